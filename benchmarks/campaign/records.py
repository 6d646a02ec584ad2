"""Outcomes as JSON: for the file of a campaign, for its continuation, and between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.campaign.check import Check, Figure, Finding
from benchmarks.campaign.runner import NOT_RUN, Outcome


def record(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as JSON."""
    finding = outcome.finding
    return {
        "number": outcome.check.number,
        "name": outcome.check.name,
        "measures": outcome.check.measures,
        "state": outcome.state,
        "reason": outcome.reason,
        "crashed": outcome.crashed,
        "seconds": round(outcome.seconds, 1),
        "cases": finding.cases if finding else None,
        "full_cases": outcome.check.cases,
        "note": finding.note if finding else "",
        "figures": [
            {
                "name": figure.name,
                "value": float(figure.value),
                "bound": float(figure.bound),
                "at_least": figure.at_least,
                "judged": bool(figure.judged),
                "holds": bool(figure.holds),
            }
            for figure in (finding.figures if finding else ())
        ],
    }


def outcome_of(said: Mapping[str, Any], check: Check) -> Outcome:
    """Returns the outcome that `record` has written."""
    finding = None
    if said["cases"] is not None:
        figures = [
            Figure(one["name"], one["value"], one["bound"], one["at_least"], one["judged"])
            for one in said["figures"]
        ]
        finding = Finding(said["cases"], tuple(figures), said["note"])
    return Outcome(check, said["seconds"], finding, said["reason"], said["crashed"])


def document(
    outcomes: Sequence[Outcome], machine: Mapping[str, Any], seed: int, minutes: float
) -> dict[str, Any]:
    """Returns everything as JSON."""
    return {
        "machine": machine,
        "seed": seed,
        "minutes": minutes,
        "checks": [record(outcome) for outcome in outcomes],
    }


def read_done(path: Path, checks: Sequence[Check], seed: int) -> dict[str, Outcome]:
    """Returns the outcomes of an interrupted campaign, by number. Checks that did not run are left.

    Raises:
        ValueError: If the file is of a campaign with another seed.
        OSError: If the file cannot be read.
    """
    said = json.loads(path.read_text(encoding="utf-8"))
    if said["seed"] != seed:
        raise ValueError(f"{path} has seed {said['seed']}; continue with --seed {said['seed']}")
    by_number = {check.number: check for check in checks}
    return {
        one["number"]: outcome_of(one, by_number[one["number"]])
        for one in said["checks"]
        if one["number"] in by_number and one["state"] != NOT_RUN
    }
