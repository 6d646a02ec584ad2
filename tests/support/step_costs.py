"""Stated costs of a step, and groups that choose by them whether to draft."""

from recserve.core.cost import Cost
from recserve.search.plan_choice import Group, PlanChoice
from recserve.search.step_costs import StepCosts

LINE = Cost((1, 100), (1.0, 2.0))


STEEP = Cost((1, 100), (0.1, 100.0))


def flat(milliseconds: float) -> Cost:
    return Cost((1, 1000), (milliseconds, milliseconds))


DEAR = {
    "rounds": StepCosts(LINE, flat(10.0), flat(10.5), flat(10.0)),
    "nodes": StepCosts(STEEP, flat(0.0), flat(0.5), flat(0.2)),
}


def drafted_at(choice: PlanChoice, group: Group, draft_ms: float, beam_ms: float, count: int):
    """Whether each of so many groups drafts, on a machine where it takes just so long."""
    found = []
    for _ in range(count):
        drafted = choice.plan(group).margin > 0
        choice.took(group, drafted, draft_ms if drafted else beam_ms)
        found.append(drafted)
    return found
