"""R25: several replicas with one catalogue, whose histories a checker judges."""

from __future__ import annotations

from benchmarks.campaign.catalog_fleet import Seen, on_one_redis, with_failovers
from benchmarks.campaign.catalog_histories import (
    CODES,
    END,
    FUTURE,
    ORACLE,
    ORDER,
    POSITION,
    STALE,
    STATE,
    Result,
)
from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.fleet_faults import Plan
from benchmarks.campaign.site import Site

OPERATIONS, FAULTS = 20_000, 40
FULL_S = 1500.0  # time of a full run
FAILOVER_OPERATIONS, FAILOVERS = 0.2, 0.15  # parts of both
GUARANTEES = {
    "changes out of their order": (POSITION, ORDER),
    "reads that no order of the changes explains": (STATE, FUTURE, ORACLE),
    "answers older than the version that the request names": (STALE,),
    "semantic ids that differ between replicas": (CODES,),
    "replicas that differ at the end": (END,),
}


@check(
    "R25",
    "fleet",
    "3 replicas with one catalogue in Redis: histories of 8 clients under faults",
    cases=OPERATIONS,
    minimum_s=120,
    weight=4,
)
def fleet(site: Site, budget: Budget) -> Finding:
    """Checks the histories of replicas on one Redis, and of replicas on a Redis that fails over."""
    part = min(1.0, budget.seconds / FULL_S)
    operations, faults = int(OPERATIONS * part), max(6, round(FAULTS * part))
    failovers = max(2, round(faults * FAILOVERS))
    moved = int(operations * FAILOVER_OPERATIONS)
    # Starts take time, and a few more operations than wanted do no harm.
    plan = Plan(operations - moved, faults - failovers, 0.6 * budget.seconds, site.seed)
    one = on_one_redis(site, plan)
    two = with_failovers(site, Plan(moved, failovers, 0.25 * budget.seconds, site.seed + 1))
    runs = (one, two)
    counted = sum(run.num_operations for run in runs)
    return Finding(
        counted,
        (
            Figure("faults", sum(sum(run.faults.values()) for run in runs), faults, at_least=True),
            *(
                Figure(name, sum(run.report.count(*kinds) for run in runs), 0)
                for name, kinds in GUARANTEES.items()
            ),
            Figure("changes that nobody asked for", sum(run.report.unasked for run in runs), 0),
            Figure("acknowledged changes that one Redis lost", len(one.report.lost), 0),
            Figure("acknowledged events that one Redis lost", one.lost_events, 0),
            Figure("failovers with a loss that no replica counted", _untold(two), 0),
            Figure("unexpected answers", sum(len(run.record.wrong) for run in runs), 0),
        ),
        "; ".join(_words(run) for run in runs),
    )


def _untold(run: Seen) -> int:
    """Whether acknowledged changes are lost and no replica has counted a loss."""
    return int(bool(run.report.lost) and not run.losses)


def _words(run: Seen) -> str:
    """Returns what a reader must know of a run."""
    report, record = run.report, run.record
    faults = ", ".join(f"{count} x {name}" for name, count in run.faults.items())
    changes = sum(one.changes for one in record.operations)
    unknown, failed = (
        sum(one.result is result for one in record.operations)
        for result in (Result.UNKNOWN, Result.FAILED)
    )
    first = [texts[0] for texts in report.violations.values() if texts]
    return (
        f"{run.num_operations} operations ({changes} changes, {unknown} without an answer, "
        f"{failed} refused), {faults}; "
        f"{len(report.epochs)} epochs, {len(report.lost)} acknowledged changes lost, "
        f"{run.losses:.0f} losses counted by replicas, {run.conflicts:.0f} conflicts, "
        f"{run.assigned} assignments of another bundle, "
        f"{record.warned} warnings, {record.stale} answers said catalog_stale; "
        + "; ".join([*first, *record.wrong[:2]])[:1500]
    )
