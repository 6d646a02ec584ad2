"""Replays recorded requests and tells each difference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.recorded.cases import Case
from tests.recorded.compare import TOLERANCE, Difference, differences
from tests.recorded.ways import HttpWay, ServiceWay, expected_of_service
from tests.recorded.worlds import World


@dataclass(frozen=True)
class Finding:
    """A difference with its request, and the whole answer of this commit."""

    world: str
    way: str
    case: Case
    difference: Difference
    got: Any

    def __str__(self) -> str:
        case = self.case
        return f"{self.world}/{case.route} {case.at} ({self.way}) {self.difference}"


def replay_http(world: World, cases: list[Case], tolerance: float = TOLERANCE) -> Iterator[Finding]:
    """Yields what a server process answers differently."""
    with tempfile.TemporaryDirectory() as folder, HttpWay(world, Path(folder)) as way:
        way.wait()
        for case in cases:
            got = way.ask(case)
            wanted, given = case.answer, got
            if not case.steady:
                wanted, given = wanted.get("status"), got["status"]
            for difference in differences(wanted, given, tolerance):
                yield Finding(world.name, "http", case, difference, got)


def replay_service(
    world: World, cases: list[Case], tolerance: float = TOLERANCE
) -> Iterator[Finding]:
    """Yields what `Service` answers differently in this process.

    Requests without a form in Python are left out; they change nothing that others read.
    """
    with tempfile.TemporaryDirectory() as folder, ServiceWay(world, Path(folder)) as way:
        for case in cases:
            got = way.ask(case)
            if case.service and case.steady and case.answer:
                wanted = expected_of_service(case.answer)
                for difference in differences(wanted, got, tolerance):
                    yield Finding(world.name, "service", case, difference, got)
