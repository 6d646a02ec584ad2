"""Records answers that differ, or that are missing, with the reason."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.recorded.cases import ANSWERS, read_cases, write_cases
from tests.recorded.replay import Finding

CHANGES = ANSWERS / "changes.md"
MIN_REASON = 20  # characters


def check_reason(reason: str) -> None:
    """Raises ValueError if a reason is too short to be one."""
    if len(reason.strip()) < MIN_REASON:
        raise ValueError(f"a reason has {MIN_REASON} characters or more, got {reason!r}")


def record_changes(
    findings: Sequence[Finding], reason: str, files: bool = False, folder: Path = ANSWERS
) -> int:
    """Replaces answers that differ, and writes the reason down.

    Args:
        findings: What the replay has found.
        reason: Why the new answers are right.
        files: True if the answers of `files_check` change too; they are not replaced here.
        folder: Folder of the answers.

    Returns:
        The number of changed answers.

    Raises:
        ValueError: If the reason is too short to be one, or only `Service` answers differently.
    """
    check_reason(reason)
    new = {(f.world, f.case.at): f.got for f in findings if f.way == "http"}
    alone = [f for f in findings if (f.world, f.case.at) not in new]
    if alone:
        raise ValueError(f"Service and HTTP give different answers; they must agree: {alone[0]}")
    counts: Counter[str] = Counter()
    for name in sorted({world for world, _ in new}):
        cases = read_cases(name, folder)
        changed = [replace(c, answer=new.get((name, c.at), c.answer)) for c in cases]
        counts.update(f"{name}/{c.route}" for c in cases if (name, c.at) in new)
        write_cases(name, changed, folder)
    lines = [f"- {route}: {count}\n" for route, count in sorted(counts.items())]
    lines += ["- files\n"] if files else []
    today = datetime.datetime.now(datetime.UTC).date()
    with (folder / CHANGES.name).open("a", encoding="utf-8") as file:
        file.write(f"\n## {today}: {reason.strip()}\n\n{''.join(lines)}")
    return counts.total()
