"""Recorded requests with their answers, one JSON line each, in a file per route."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parent / "answers"


@dataclass(frozen=True)
class Case:
    """A request and its answer.

    Attributes:
        at: Place in the sequence of its world. Requests are sent in this order, because an answer
            may depend on the events, items and texts before it.
        route: Name of the file that holds the case.
        method: HTTP method.
        path: Path with query.
        body: JSON body; None for none.
        raw: Body that is sent as it is, in place of `body`.
        headers: Further headers.
        service: True if `Service` gives the same answer.
        steady: False if the answer depends on the kernels; then only its status is compared.
        answer: Status, headers and body; empty before it is recorded.
    """

    at: int
    route: str
    method: str
    path: str
    body: Any = None
    raw: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    service: bool = False
    steady: bool = True
    answer: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Returns the case as a line of JSON, without fields that have their default."""
        fields = {name: value for name, value in asdict(self).items() if name != "route"}
        unset = {"body": None, "raw": None, "headers": {}, "service": False, "steady": True}
        given = {n: v for n, v in fields.items() if n not in unset or v != unset[n]}
        return json.dumps(given, ensure_ascii=False, separators=(",", ":"))


def read_cases(world: str, folder: Path = ANSWERS) -> list[Case]:
    """Returns the cases of a world in the order in which they are sent."""
    found = []
    for path in (folder / world).glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            found.append(Case(route=path.stem, **json.loads(line)))
    return sorted(found, key=lambda case: case.at)


def write_cases(world: str, cases: Iterable[Case], folder: Path = ANSWERS) -> None:
    """Replaces the recorded cases of a world."""
    routes: dict[str, list[Case]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: case.at):
        routes[case.route].append(case)
    target = folder / world
    target.mkdir(parents=True, exist_ok=True)
    for path in target.glob("*.jsonl"):
        path.unlink()
    for route, own in routes.items():
        text = "".join(case.line() + "\n" for case in own)
        (target / f"{route}.jsonl").write_text(text, encoding="utf-8")
