"""Runs the reliability campaign and prints each figure beside its bound.

    python -m benchmarks.campaign --minutes 10 [--only R2 R4] [--json F.json] [--markdown F.md]

Every check starts real server processes on loopback. The exit status is 1 if a figure misses its
bound or a check ends with an error. A check that cannot run says why, and counts as not run. With
few minutes a check tries few cases; the table says how many of those of a full campaign.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.campaign import registry
from benchmarks.campaign.report import document, markdown, summary, table
from benchmarks.campaign.runner import FAILED, Outcome, run_all
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
    checks = registry.chosen(given.only)
    facts = machine()

    def tell(outcome: Outcome) -> None:
        head = f"{outcome.check.number} {outcome.check.name}: {outcome.state}"
        console.print(f"{head} in {outcome.seconds:.0f} s {outcome.reason}", highlight=False)

    with tempfile.TemporaryDirectory(prefix="recserve-campaign-") as folder:
        site = Site(Path(folder), given.seed)
        outcomes = run_all(checks, site, given.minutes * 60, tell, skip=not given.only)
    seconds = sum(outcome.seconds for outcome in outcomes)
    console.print(table(outcomes))
    for outcome in outcomes:
        if outcome.finding is not None and outcome.finding.note:
            console.print(f"{outcome.check.number}: {outcome.finding.note}", highlight=False)
    console.print(summary(outcomes))
    if given.json:
        write_json(given.json, document(outcomes, facts))
    if given.markdown:
        given.markdown.write_text(markdown(outcomes, facts, seconds), encoding="utf-8")
    return int(any(outcome.state == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
