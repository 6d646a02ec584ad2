"""Runs a check in a process of its own, so that a check that hangs or dies loses no other one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.campaign.check import Check
from benchmarks.campaign.records import outcome_of, record
from benchmarks.campaign.runner import Outcome, run_one
from benchmarks.campaign.site import Site

# Checks may take longer than their share: the last case ends late, a slow server ends late.
LATE_FACTOR, LATE_S = 2.0, 120.0


def run_isolated(check: Check, site: Site, seconds: float, late_s: float = LATE_S) -> Outcome:
    """Runs a check in a child process, as `run_one`.

    A check that takes far longer than its share is ended, with all processes that it has started.

    Args:
        check: The check.
        site: Where it works. What the check adds to the folder stays.
        seconds: Its share.
        late_s: How much longer than twice its share it may take.
    """
    began = time.monotonic()
    answer = site.folder / f"{check.number}.json"
    answer.unlink(missing_ok=True)
    limit_s = LATE_FACTOR * seconds + late_s
    child = multiprocessing.get_context("fork").Process(
        target=_run, args=(check, site, seconds, answer), name=check.number
    )
    child.start()
    assert child.pid is not None
    try:
        child.join(limit_s)
    except BaseException:  # the campaign is interrupted
        end_tree(child.pid)
        raise
    reason = f"ended after {limit_s:.0f} s without a result"
    if child.exitcode is None:
        end_tree(child.pid)
        child.join()
    elif answer.exists():
        return outcome_of(json.loads(answer.read_text(encoding="utf-8")), check)
    else:
        reason = f"the process of the check ended with status {child.exitcode}"
    return Outcome(check, time.monotonic() - began, reason=reason, crashed=True)


def _run(check: Check, site: Site, seconds: float, answer: Path) -> None:
    tempfile.tempdir = str(site.folder)  # what the check leaves behind goes with the campaign
    site.begin(check.number)
    outcome = run_one(check, site, seconds)
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(record(outcome)), encoding="utf-8")
    partial.replace(answer)


def end_tree(pid: int) -> None:
    """Kills a process and all that descend from it, the servers of a check for example."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    for one in found:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
