"""R26: several replicas with one experiment, whose counts a checker judges."""

from __future__ import annotations

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.experiment_fleet import Seen, on_one_redis
from benchmarks.campaign.fleet_faults import Plan
from benchmarks.campaign.site import Site

OPERATIONS, FAULTS = 20_000, 40
FULL_S = 1200.0  # time of a full run


@check(
    "R26",
    "shared experiment",
    "3 replicas with one experiment in Redis: counts of 8 clients under faults",
    cases=OPERATIONS,
    minimum_s=90,
    weight=2,
)
def shared_experiment(site: Site, budget: Budget) -> Finding:
    """Checks the counts, the verdicts and the switch of replicas on one Redis."""
    part = min(1.0, budget.seconds / FULL_S)
    faults = max(6, round(FAULTS * part))
    plan = Plan(int(OPERATIONS * part), faults, 0.7 * budget.seconds, site.seed)
    run = on_one_redis(site, plan)
    return Finding(
        run.num_operations,
        (
            Figure("faults", sum(run.faults.values()), faults, at_least=True),
            Figure("groups whose clicks are not those acknowledged", len(run.clicks), 0),
            Figure("groups with more answers than were given, or lost untold", len(run.answers), 0),
            Figure("answers of an arm two seconds after a stop", len(run.stops), 0),
            Figure("replicas that differ from one process", len(run.verdicts), 0),
            Figure("unexpected answers", len(run.record.wrong), 0),
        ),
        _words(run),
    )


def _words(run: Seen) -> str:
    """Returns what a reader must know of a run."""
    faults = ", ".join(f"{count} x {name}" for name, count in run.faults.items())
    share = run.lacking / max(run.requests + run.lacking, 1)
    acknowledged = sum(run.record.clicks.values())
    first = [texts[0] for texts in (run.clicks, run.answers, run.stops, run.verdicts) if texts]
    return (
        f"{len(run.record.answers)} requests, {acknowledged} of {len(run.record.clicks)} clicks "
        f"acknowledged, {faults}; {run.lacking} answers ({share:.2%}) not counted, {run.told} "
        "told; " + "; ".join([*first, *run.record.wrong[:2]])[:1500]
    )
