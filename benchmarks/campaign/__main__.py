"""Runs the reliability campaign and prints each figure beside its bound.

    python -m benchmarks.campaign --minutes 10 [--only R2 R4] [--json F.json] [--markdown F.md]

Every check starts real server processes on loopback, and runs in a process of its own. The files
are written after every check. The exit status is 1 if a figure misses its bound or a check ends
with an error. A check that cannot run says why, and counts as not run. With few minutes a check
tries few cases; the table says how many of those of a full campaign.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.campaign import registry
from benchmarks.campaign.check import Check
from benchmarks.campaign.isolation import run_isolated
from benchmarks.campaign.records import document
from benchmarks.campaign.report import markdown, summary, table
from benchmarks.campaign.runner import FAILED, Listener, Outcome, run_all
from benchmarks.campaign.site import Site
from benchmarks.support.runs import machine, write_json


def options() -> argparse.Namespace:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="time of the campaign")
    parser.add_argument("--only", nargs="+", metavar="R", help="only these checks, each of them")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that is drawn")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser.parse_args()


def main() -> int:
    """Runs the campaign; returns the exit status."""
    given = options()
    console = Console(width=None if sys.stdout.isatty() else 160)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers too
    checks = registry.chosen(given.only)
    facts = machine()

    def begins(check: Check, seconds: float) -> None:
        now = time.strftime("%H:%M:%S")
        console.print(f"{now} {check.number} {check.name}: up to {seconds:.0f} s", highlight=False)

    def ended(outcome: Outcome, outcomes: Sequence[Outcome]) -> None:
        head = f"{outcome.check.number} {outcome.check.name}: {outcome.state}"
        console.print(f"{head} in {outcome.seconds:.0f} s {outcome.reason}", highlight=False)
        if given.json:
            write_json(given.json, document(outcomes, facts, given.seed, given.minutes))
        if given.markdown:
            given.markdown.write_text(markdown(outcomes, facts), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="recserve-campaign-") as folder:
        site = Site(Path(folder), given.seed)
        listener = Listener(begins, ended)
        outcomes = run_all(
            checks,
            site,
            given.minutes * 60,
            listener,
            skip=not given.only,
            run=run_isolated,
        )
    console.print(table(outcomes))
    for outcome in outcomes:
        if outcome.finding is not None and outcome.finding.note:
            console.print(f"{outcome.check.number}: {outcome.finding.note}", highlight=False)
    console.print(summary(outcomes))
    return int(any(outcome.state == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
