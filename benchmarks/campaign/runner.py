"""Runs checks one after the other, each within its share of the campaign's time."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.campaign.check import Budget, Check, Finding, NotRun
from benchmarks.campaign.site import Site

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Attributes:
        check: The check.
        seconds: How long it ran.
        finding: What it measured; None if it ended with an error or did not run.
        reason: Why there is no finding.
        crashed: Whether it ended with an error.
    """

    check: Check
    seconds: float = 0.0
    finding: Finding | None = None
    reason: str = ""
    crashed: bool = False

    @property
    def state(self) -> str:
        """PASSED, FAILED or NOT_RUN."""
        if self.finding is not None:
            return PASSED if all(figure.holds for figure in self.finding.figures) else FAILED
        return FAILED if self.crashed else NOT_RUN


def run_all(
    checks: Sequence[Check],
    site: Site,
    seconds: float,
    tell: Callable[[Outcome], None],
    clock: Callable[[], float] = time.monotonic,
    skip: bool = True,
) -> list[Outcome]:
    """Runs checks in order.

    Each check gets its minimum and a share of what is left beyond the minima of the checks from it
    on. Time that a check does not use goes to the later ones. A check whose minimum no longer fits
    is not run if `skip`.

    Args:
        checks: The checks, the most valuable first.
        site: Where they work.
        seconds: Time of the campaign.
        tell: Called with each outcome.
        clock: Returns seconds.
        skip: Whether checks are left out when the time is used up.
    """
    began = clock()
    outcomes = []
    for number, check in enumerate(checks):
        left = seconds - (clock() - began)
        outcome = Outcome(check, reason=f"needs {check.minimum_s:g} s; {left:.0f} s are left")
        if left >= check.minimum_s or not skip:
            later = checks[number:]
            extra = max(0.0, left - sum(one.minimum_s for one in later))
            share = extra * check.weight / sum(one.weight for one in later)
            outcome = run_one(check, site, check.minimum_s + share)
        outcomes.append(outcome)
        tell(outcome)
    return outcomes


def run_one(check: Check, site: Site, seconds: float) -> Outcome:
    """Runs one check; an error of it is its outcome."""
    began = time.monotonic()
    finding, reason, crashed = None, "", False
    try:
        finding = check.run(site, Budget(seconds))
    except NotRun as why:
        reason = str(why)
    except Exception as error:
        reason, crashed = f"{type(error).__name__}: {error}"[:600], True
        traceback.print_exc()
    return Outcome(
        check=check,
        seconds=time.monotonic() - began,
        finding=finding,
        reason=reason,
        crashed=crashed,
    )
