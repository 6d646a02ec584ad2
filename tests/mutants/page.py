"""Writes the page of the mutants from their results."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOAL = 0.95
RESULT = "## Result\n"


@dataclass
class Survivors:
    """Reasons why mutants may survive.

    Attributes:
        path: File with the reasons.
        unused: Reasons that no surviving mutant has needed yet.
    """

    path: Path
    unused: dict[tuple[str, str, str], str] = field(init=False)

    def __post_init__(self) -> None:
        table = tomllib.loads(self.path.read_text(encoding="utf-8"))
        self._reasons: dict[tuple[str, str, str], str] = {
            (s["file"], s["old"], s["new"]): s["reason"] for s in table["survivor"]
        }
        self.unused = dict(self._reasons)

    def reason(self, record: dict[str, Any]) -> str:
        """Returns why a mutant may survive, empty if nobody has said so."""
        key = record["file"], record["old"], record["new"]
        self.unused.pop(key, None)
        return self._reasons.get(key, "")


def write_page(
    path: Path, records: Sequence[dict[str, Any]], total: int, survivors: Survivors
) -> bool:
    """Writes the results into the page, below its heading, and prints a summary.

    Args:
        path: Path of the page.
        records: Results of the mutants that were tried.
        total: Number of mutants.
        survivors: Reasons why mutants may survive.

    Returns:
        Whether every mutant was tried, every survivor has a reason, and the goal is reached.
    """
    left = [record for record in records if record["outcome"] == "survived"]
    reasons = [survivors.reason(record) for record in left]
    killed = len(records) - len(left)
    share = killed / max(1, len(records))
    drawn = sum(not record["name"] for record in records)
    summary = (
        f"{killed} of {len(records)} mutants were killed ({share:.1%}): {drawn} drawn with seed "
        f"{records[0]['seed'] if records else 0}, {len(records) - drawn} made by hand. "
        f"{len(left)} survived, {total - len(records)} have no result yet. "
        "The times are processor seconds."
    )
    lines = ["", summary, "", *_table(records), ""]
    if left:
        lines += ["## Survivors", "", "| place | change | why no test fails |", "|---|---|---|"]
        for record, reason in zip(left, reasons, strict=True):
            change = _change(record)
            lines.append(f"| {_place(record)} | {change} | {reason or '**not explained**'} |")
        lines.append("")
    lines += ["## Made by hand", "", "| fault | place | result | first test that fails |"]
    lines += ["|---|---|---|---|", *(_row(r, r["name"]) for r in records if r["name"]), ""]
    lines += ["## Drawn", "", "| change | place | result | first test that fails |"]
    lines += ["|---|---|---|---|", *(_row(r, _change(r)) for r in records if not r["name"])]
    before, heading, _ = path.read_text(encoding="utf-8").partition(RESULT)
    path.write_text(before + heading + "\n".join(lines) + "\n", encoding="utf-8")
    print(summary)
    for record, reason in zip(left, reasons, strict=True):
        if not reason:
            print(
                f"survived: {record['file']} {record['place']}: {record['old']} -> {record['new']}"
            )
    for file, old, _ in survivors.unused:
        print(f"{survivors.path.name}: no mutant of {file} with this line survives: {old}")
    return len(records) == total and all(reasons) and share >= GOAL


def _table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| promise | mutants | killed | by the time limit | survived | its tests, unchanged |"
    yield "|---|---|---|---|---|---|"
    for name in sorted({record["promise"] for record in records}):
        own = [record for record in records if record["promise"] == name]
        outcomes, taken = [r["outcome"] for r in own], max(r["unchanged_cpu_s"] for r in own)
        killed, late = outcomes.count("killed"), outcomes.count("timeout")
        left = outcomes.count("survived")
        yield f"| {name} | {len(outcomes)} | {killed + late} | {late} | {left} | {taken:.0f} s |"


def _row(record: dict[str, Any], first: str) -> str:
    path, _, name = record["test"].partition("::")
    test = _code(f"{path.rpartition('/')[2]}::{name}") if path else ""
    return f"| {first} | {_place(record)} | {record['outcome']} | {test} |"


def _place(record: dict[str, Any]) -> str:
    return f"{record['file'].removeprefix('recserve/')}: {_code(record['place'])}"


def _change(record: dict[str, Any]) -> str:
    return f"{_code(record['old'])} → {_code(record['new'])}"


def _code(text: str) -> str:
    """Returns text as code in a cell of a table, 90 characters at most."""
    short = text if len(text) <= 90 else f"{text[:87]}..."
    return f"`{short}`".replace("|", "\\|")
