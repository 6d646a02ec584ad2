"""Which draft `speculative` makes for a request, by the draft head's calibration.

A verified draft equals beam search, so a plan is only a question of speed. The rule reads no clock:
it compares the work of a plan with that of beam search, as validation users needed it.
"""

from __future__ import annotations

from recserve.models.drafters.calibration import Calibration, DraftPlan

NO_DRAFT = DraftPlan(0.0, 0.0, 0.0, 1.0)
# The plan of a head without a calibration: nothing is known of it, so it always drafts.
UNCALIBRATED = DraftPlan(2.0, 0.0, 0.0, 1.0)
ROUND_NODES = 20  # a round costs about as much as so many more nodes in one forward
WORTHWHILE = 0.8  # largest share of beam search's work; the head's own search takes the rest


def draft_plan(calibration: Calibration | None, width: int, k: int) -> DraftPlan:
    """Returns the plan with the least work, or NO_DRAFT where beam search is about as cheap.

    Args:
        calibration: Measured plans of the draft head, or None.
        width: Beam width of the request.
        k: Items that the request asks for.
    """
    if calibration is None:
        return UNCALIBRATED
    plans = calibration.scaled(width, k)
    best = cheapest_draft(plans)
    beam = min((work(plan) for plan in plans if not plan.margin), default=float("inf"))
    return best if work(best) < WORTHWHILE * beam else NO_DRAFT


def cheapest_draft(plans: list[DraftPlan]) -> DraftPlan:
    """Returns the plan that drafts with the least work, NO_DRAFT if none drafts."""
    return min((plan for plan in plans if plan.margin), key=work, default=NO_DRAFT)


def work(plan: DraftPlan) -> float:
    """Returns the expected work of a plan, in nodes."""
    return plan.nodes + ROUND_NODES * (1 + plan.repairs)
