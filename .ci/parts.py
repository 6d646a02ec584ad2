"""Chooses the rooms whose slow tests run, and notes which of them passed.

    python .ci/parts.py choose                prints the rooms to run, and those that do not run
    python .ci/parts.py passed TIMES ROOM...  notes that the slow tests of these rooms passed

A room is a folder of `tests`. Its digest covers its tests, all modules that they reach by imports
or by name, and what every test depends on. `.ci/passed.txt` holds for each room the digest with
which its slow tests last passed, the day, and the seconds that they took (TIMES is the JUnit file
of that run). It is committed, so a room runs if something that it depends on has changed since.

Changed rooms run in the order of their last pass, the oldest first, until BUDGET_S is used. One of
the unchanged rooms runs after them if there is time. Rooms that passed on the same day take turns
from commit to commit. `CI_PART=all` chooses all rooms, and `CI_PART="batch cli"` these too.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PASSED = ROOT / ".ci" / "passed.txt"
OF_ALL = ("pyproject.toml", "constraints.txt", "setup.py", "Makefile", "tests/conftest.py")
OF_EVERYTHING = ("deploy", "integration", "repository")  # rooms that read pages, files and wheels
BUDGET_S = 1200  # of two workers
WORKERS = 2
NAME = re.compile(r"\b(?:recserve|tests|benchmarks)(?:\.\w+)+")


def git(*words: str) -> str:
    """Returns what git prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@functools.cache
def tracked() -> frozenset[str]:
    """Returns the tracked files that exist, except the notes themselves."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return frozenset(f for f in listed if (ROOT / f).is_file() and f != ".ci/passed.txt")


def file_of(module: str) -> str | None:
    """Returns the file of a module, or of the longest part of a dotted name that is one."""
    parts = module.split(".")
    while len(parts) > 1:
        path = "/".join(parts)
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if candidate in tracked():
                return candidate
        parts.pop()
    return None


def named(tree: ast.AST) -> Iterator[str]:
    """Yields the modules that a file imports, names in a string or starts as a program."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from NAME.findall(node.value)
        elif isinstance(node, ast.List | ast.Tuple):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            if "recserve" in words:  # a command line
                yield from ("recserve.__main__", "recserve.cli.app")


@functools.cache
def reads(path: str) -> frozenset[str]:
    """Returns the files that a file needs: modules by name, and data beside a module."""
    folder = path.rpartition("/")[0]
    found: set[str] = set()
    if folder:  # pages at the top of the repository are read by the rooms of OF_EVERYTHING
        found = {f for f in tracked() if f.rpartition("/")[0] == folder and not f.endswith(".py")}
    if path.endswith(".py"):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found.update(filter(None, map(file_of, named(tree))))
        found.add(f"{folder}/__init__.py")
    return frozenset(found & tracked())


def files_of(room: str) -> list[str]:
    """Returns the files on which the tests of a room depend."""
    if room in OF_EVERYTHING:
        return sorted(tracked())
    waiting = [f for f in tracked() if f.startswith(f"tests/{room}/") or f in OF_ALL]
    found = set(waiting)
    while waiting:
        new = reads(waiting.pop()) - found
        found |= new
        waiting += new
    return sorted(found)


def digest(room: str) -> str:
    """Returns the digest of the files on which the tests of a room depend."""
    whole = hashlib.sha256()
    for path in files_of(room):
        whole.update(path.encode() + b"\0" + hashlib.sha256((ROOT / path).read_bytes()).digest())
    return whole.hexdigest()[:16]


class Pass(NamedTuple):
    """The last run of a room in which all of its slow tests passed.

    Attributes:
        digest: Digest of the files on which the room depended.
        day: ISO date.
        seconds: Time of the slow tests with two workers.
    """

    digest: str
    day: str
    seconds: int


def notes() -> dict[str, Pass]:
    """Returns the last pass of each room that has passed."""
    if not PASSED.exists():
        return {}
    lines = (line.split() for line in PASSED.read_text(encoding="utf-8").splitlines())
    return {room: Pass(found, day, int(seconds)) for room, found, day, seconds in lines}


def rooms_with_slow_tests() -> list[str]:
    """Returns the folders of `tests` that have slow tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "slow", "tests"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    rooms = sorted(set(re.findall(r"^tests/(\w+)/\S+: \d+$", shown, re.MULTILINE)))
    return rooms or sys.exit(f"no slow tests were found:\n{shown}")  # type: ignore[return-value]


def choose() -> None:
    """Prints the rooms to run on one line, and a line for each that does not run."""
    rooms, passed = rooms_with_slow_tests(), notes()
    wanted = os.environ.get("CI_PART", "").split()
    if unknown := set(wanted) - {*rooms, "all"}:
        sys.exit(
            f"CI_PART is {' '.join(sorted(unknown))}; choose all or some of {', '.join(rooms)}"
        )
    unchanged = [r for r in rooms if r in passed and passed[r].digest == digest(r)]
    commits = int(git("rev-list", "--count", "HEAD"))
    changed = [r for r in turn(rooms, commits) if r not in unchanged]
    changed.sort(key=lambda r: passed[r].day if r in passed else "")
    chosen, left_s = [], BUDGET_S
    for room in changed + turn(unchanged, commits)[:1]:
        seconds = passed[room].seconds if room in passed else 0
        if seconds <= left_s or not chosen:
            chosen.append(room)
            left_s -= seconds
    run = [r for r in rooms if r in chosen or {r, "all"} & set(wanted)]
    print(*run)
    for room in rooms:
        if room not in run:
            why = "it is unchanged" if room in unchanged else f"{BUDGET_S // 60} minutes are used"
            print(f"{room}: not run, as {why}; it passed on {passed[room].day}")


def turn(rooms: list[str], number: int) -> list[str]:
    """Returns the rooms in the same order, but with another first one for each number."""
    start = number % len(rooms) if rooms else 0
    return rooms[start:] + rooms[:start]


def note(rooms: list[str], times: Path) -> None:
    """Notes that the slow tests of these rooms passed.

    Args:
        rooms: Names of the rooms.
        times: JUnit file of the run.
    """
    seconds = dict.fromkeys(rooms, 0.0)
    for case in ElementTree.parse(times).iter("testcase"):
        room = case.attrib["classname"].split(".")[1]
        if room in seconds:
            seconds[room] += float(case.attrib["time"]) / WORKERS
    today = date.today().isoformat()
    known = notes() | {room: Pass(digest(room), today, round(seconds[room])) for room in rooms}
    lines = (f"{room} {p.digest} {p.day} {p.seconds}\n" for room, p in sorted(known.items()))
    PASSED.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["choose"]:
        choose()
    elif sys.argv[1:2] == ["passed"] and len(sys.argv) > 2:
        note(sys.argv[3:], Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
