"""A campaign's outcomes as a table, as Markdown and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.campaign.runner import FAILED, Outcome

HEADS = ("", "check", "figure", "value", "bound", "cases", "s", "state")


def rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Yields one row for each figure, in the order of HEADS."""
    for outcome in outcomes:
        check, finding = outcome.check, outcome.finding
        first = (check.number, check.name)
        if finding is None:
            yield (*first, outcome.reason, "", "", "", f"{outcome.seconds:.0f}", outcome.state)
            continue
        for number, figure in enumerate(finding.figures):
            state = outcome.state if figure.holds else FAILED
            yield (
                *(first if not number else ("", "")),
                figure.name,
                f"{figure.value:.4g}",
                figure.words,
                f"{finding.cases:,} of {check.cases:,}" if not number else "",
                f"{outcome.seconds:.0f}" if not number else "",
                state if not number or not figure.holds else "",
            )


def table(outcomes: Sequence[Outcome]) -> Table:
    """Returns the table for a terminal."""
    made = Table(title="reliability campaign", title_justify="left")
    for head in HEADS:
        made.add_column(head)
    for row in rows(outcomes):
        made.add_row(*row)
    return made


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns how many checks ended in each state."""
    counts = Counter(outcome.state for outcome in outcomes)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def markdown(outcomes: Sequence[Outcome], machine: dict[str, Any], seconds: float) -> str:
    """Returns the table, the notes and the machine as Markdown."""
    lines = [
        f"{summary(outcomes)}; {seconds:.0f} s on {machine['processor']}, "
        f"{machine['cores']} cores, load {machine['load_before']} before.",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(outcomes)]
    notes = [
        f"- {outcome.check.number} {outcome.check.name}: {outcome.finding.note}"
        for outcome in outcomes
        if outcome.finding is not None and outcome.finding.note
    ]
    return "\n".join([*lines, "", *notes, ""])


def document(outcomes: Sequence[Outcome], machine: dict[str, Any]) -> dict[str, Any]:
    """Returns everything as JSON."""
    return {
        "machine": machine,
        "checks": [
            {
                "number": outcome.check.number,
                "name": outcome.check.name,
                "measures": outcome.check.measures,
                "state": outcome.state,
                "reason": outcome.reason,
                "seconds": round(outcome.seconds, 1),
                "cases": outcome.finding.cases if outcome.finding else 0,
                "full_cases": outcome.check.cases,
                "note": outcome.finding.note if outcome.finding else "",
                "figures": [
                    {
                        "name": figure.name,
                        "value": figure.value,
                        "bound": figure.bound,
                        "at_least": figure.at_least,
                        "holds": bool(figure.holds),
                    }
                    for figure in (outcome.finding.figures if outcome.finding else ())
                ],
            }
            for outcome in outcomes
        ],
    }
