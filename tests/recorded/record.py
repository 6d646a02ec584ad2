"""Records answers: those of new requests, and wanted changes with their reason."""

from __future__ import annotations

import datetime
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.recorded.cases import ANSWERS, Case, read_cases, write_cases
from tests.recorded.compare import differences
from tests.recorded.replay import Finding
from tests.recorded.ways import HttpWay, ServiceWay, expected_of_service
from tests.recorded.worlds import World

CHANGES = ANSWERS / "changes.md"
MIN_REASON = 20  # characters
# Differences between two kernels may be this large at most. Replays allow more, so that a third
# kernel is allowed too.
RECORDING_TOLERANCE = 1e-5
# Two scores of one list that are closer may change places on another processor.
MIN_GAP = 2e-5


def answer_cases(world: World, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns the answers of a server process."""
    with tempfile.TemporaryDirectory() as folder, HttpWay(world, Path(folder)) as way:
        way.wait()
        return [way.ask(case) for case in cases]


def record_all(world: World, drawn: Sequence[Case]) -> list[Case]:
    """Returns drawn requests with the answers of this machine's own kernels."""
    cases = [replace(c, answer=a) for c, a in zip(drawn, answer_cases(world, drawn), strict=True)]
    return mark_service(world, [replace(c, steady=c.steady and not near_tie(c)) for c in cases])


def mark_unsteady(world: World, cases: Sequence[Case]) -> list[Case]:
    """Marks the cases to which the kernels of this process' environment give another answer.

    They are sent all the same, because later answers may depend on them.
    """
    marked: list[Case] = []
    for case, got in zip(cases, answer_cases(world, cases), strict=True):
        found = list(differences(case.answer, got, RECORDING_TOLERANCE)) if case.steady else []
        if found:
            print(f"unsteady: {world.name}/{case.route} {case.at}: {found[0]}")
        marked.append(replace(case, steady=case.steady and not found))
    return marked


def near_tie(case: Case) -> bool:
    """Returns whether the answer sorts two items by nearly equal scores."""
    return "scoring" not in case.route and has_near_tie(case.answer)


def has_near_tie(answer: Any) -> bool:
    """Returns whether two neighbours of a list have nearly equal scores."""
    if isinstance(answer, dict):
        return any(map(has_near_tie, answer.values()))
    if not isinstance(answer, list):
        return False
    scores = [
        one[name]
        for one in answer
        if isinstance(one, dict)
        for name in ("score", "relevance_score")
        if isinstance(one.get(name), float)
    ]
    gaps = [abs(a - b) for a, b in zip(scores, scores[1:], strict=False)]
    return any(gap < MIN_GAP for gap in gaps) or any(map(has_near_tie, answer))


def mark_service(world: World, cases: list[Case]) -> list[Case]:
    """Marks the cases to which `Service` gives the same answer, and prints the others."""
    if world.bundle is None:
        return cases
    marked: list[Case] = []
    with tempfile.TemporaryDirectory() as folder, ServiceWay(world, Path(folder)) as way:
        for case in cases:
            got = way.ask(case)
            if got is not None:
                found = list(differences(expected_of_service(case.answer), got))
                case = replace(case, service=not found)
                if found:
                    print(f"HTTP only: {case.route} {case.at}: {found[0]}")
            marked.append(case)
    return marked


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
