"""Outcomes as JSON, for the file of a campaign and between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.campaign.check import Check, Figure, Finding
from benchmarks.campaign.runner import Outcome


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
