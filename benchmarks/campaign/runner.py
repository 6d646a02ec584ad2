"""Runs checks one after the other, each within its share of the campaign's time."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.campaign.check import Budget, Check, Finding, NotRun
from benchmarks.campaign.site import Site

PASSED, FAILED, NOT_JUDGED, NOT_RUN = "passed", "failed", "not judged", "not run"


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
        """PASSED, FAILED, NOT_JUDGED or NOT_RUN.

        One figure outside its bound fails the check. Otherwise one figure that is not judged leaves
        the check not judged.
        """
        if self.finding is None:
            return FAILED if self.crashed else NOT_RUN
        if any(figure.misses for figure in self.finding.figures):
            return FAILED
        return PASSED if all(figure.judged for figure in self.finding.figures) else NOT_JUDGED


RunOne = Callable[[Check, Site, float], Outcome]


@dataclass(frozen=True)
class Listener:
    """What is told about a campaign while it runs.

    Attributes:
        begins: Called with each check before it runs, and with the seconds that it may take.
        ended: Called after each check with its outcome and with all outcomes so far.
    """

    begins: Callable[[Check, float], None] = lambda check, seconds: None
    ended: Callable[[Outcome, Sequence[Outcome]], None] = lambda outcome, outcomes: None


def share_s(checks: Sequence[Check], left_s: float) -> float:
    """Returns the time of the first check: its minimum and a share of what is beyond all minima."""
    first = checks[0]
    extra = max(0.0, left_s - sum(one.minimum_s for one in checks))
    weights = sum(one.weight for one in checks)
    return first.minimum_s + (extra * first.weight / weights if weights else 0.0)


def run_all(
    checks: Sequence[Check],
    site: Site,
    seconds: float,
    listener: Listener,
    *,
    skip: bool = True,
    run: RunOne | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Runs checks in order.

    Each check gets its minimum and a share of what is left beyond the minima of the checks from it
    on. Time that a check does not use goes to the later ones. A check whose minimum no longer fits
    is not run if `skip`.

    Args:
        checks: The checks, the most valuable first.
        site: Where they work.
        seconds: Time of the campaign.
        listener: Told before and after each check.
        skip: Whether checks are left out when the time is used up.
        run: Runs one check; None means `run_one`.
        clock: Returns seconds.
    """
    run = run or run_one
    end = clock() + seconds
    found: list[Outcome] = []
    for number, check in enumerate(checks):
        left = end - clock()
        outcome = Outcome(check, reason=f"needs {check.minimum_s:g} s; {max(left, 0):.0f} s left")
        if left >= check.minimum_s or not skip:
            share = share_s(checks[number:], left)
            listener.begins(check, share)
            outcome = run(check, site, share)
        found.append(outcome)
        listener.ended(outcome, found)
    return found


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
