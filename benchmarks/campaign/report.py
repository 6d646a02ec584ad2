"""A campaign's outcomes as a table, as Markdown and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.campaign.check import Figure
from benchmarks.campaign.runner import FAILED, NOT_JUDGED, Outcome

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
            yield (
                *(first if not number else ("", "")),
                figure.name,
                f"{figure.value:.4g}",
                figure.words,
                f"{finding.cases:,} of {check.cases:,}" if not number else "",
                f"{outcome.seconds:.0f}" if not number else "",
                outcome.state if not number else _state(figure),
            )


def _state(figure: Figure) -> str:
    """Returns what a figure says beside the state of its check."""
    if not figure.judged:
        return NOT_JUDGED
    return FAILED if figure.misses else ""


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


def markdown(outcomes: Sequence[Outcome], machine: dict[str, Any]) -> str:
    """Returns the table, the notes and the machine as Markdown."""
    seconds = sum(outcome.seconds for outcome in outcomes)
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
