"""Which tests run a line, and how long each test takes.

A statement before each line of interest, in a copy of the code, appends the line's number and the
running test to a file, in subprocesses too. The functions `pytest_*` are a plug-in that notes the
durations.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

MODULE = "recserve/_marks.py"
PID = "MARKS_PID"
TEXT = '''"""Notes which test runs a marked line."""
import os

FOLDER = {folder!r}
seen = set()


def mark(number):
    """Notes a number and the running test once."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in seen:
        seen.add((number, test))
        own = int(os.environ.get("{pid}", "") == str(os.getpid()))
        with open(f"{{FOLDER}}/{{os.getpid()}}", "a", encoding="utf-8") as file:
            file.write(f"{{number}}\\t{{own}}\\t{{test}}\\n")
'''


def add_marks(root: Path, folder: Path, places: Mapping[int, tuple[str, int]]) -> None:
    """Marks lines of a copy of the repository.

    Args:
        root: The copy.
        folder: Where the marks are noted.
        places: File and line of each number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (root / MODULE).write_text(TEXT.format(folder=str(folder), pid=PID), encoding="utf-8")
    for name in sorted({file for file, _ in places.values()}):
        tree = ast.parse((root / name).read_text(encoding="utf-8"))
        lines = {number: line for number, (file, line) in places.items() if file == name}
        for number, bodies in [(n, list(_bodies(tree, line))) for n, line in lines.items()]:
            for body, before in bodies:
                at = body.index(before) if before in body else 0
                body.insert(at, _statement(number))
        (root / name).write_text(ast.unparse(tree), encoding="utf-8")


def read_marks(folder: Path) -> dict[int, set[str]]:
    """Returns the tests that ran each number.

    What a fixture or another process ran counts for every test of the file: it ends with `::`.
    """
    found: dict[int, set[str]] = {}
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            number, own, test = line.split("\t")
            name, _, phase = test.rpartition(" ")
            if name:
                shared = own == "0" or phase != "(call)"
                key = f"{name.partition('::')[0]}::" if shared else name
                found.setdefault(int(number), set()).add(key)
    return found


def _statement(number: int) -> ast.stmt:
    text = f"__import__('recserve._marks', fromlist=['mark']).mark({number})"
    return ast.parse(text).body[0]


def _bodies(tree: ast.Module, line: int) -> Iterable[tuple[list[ast.stmt], ast.stmt]]:
    """Yields the blocks and the statements before which a mark notes that a line is run.

    A kernel of Triton takes no mark: the other functions of its file stand for it.
    """
    body, block, before = tree.body, None, None
    while True:
        around = [node for node in body if _start(node) <= line <= (node.end_lineno or 0)]
        if not around:
            break
        node = around[0]
        if isinstance(node, ast.FunctionDef) and _is_kernel(node):
            for other in ast.walk(tree):
                if isinstance(other, ast.FunctionDef) and not _is_kernel(other):
                    yield other.body, other.body[0]
            return
        if not isinstance(node, ast.ClassDef):
            block, before = body, node
        parts = list(_blocks(node))
        inner = [part for part in parts if _start(part[0]) <= line <= (part[-1].end_lineno or 0)]
        handlers = [h for h in getattr(node, "handlers", ()) if h.lineno == line]
        if handlers:
            yield handlers[0].body, handlers[0].body[0]
            return
        if not inner:
            break
        body = inner[0]
    if block is not None and before is not None:
        yield block, before


def _start(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _blocks(node: ast.stmt) -> Iterable[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if part := getattr(node, name, None):
            yield part
    for other in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield other.body


_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


def pytest_configure() -> None:
    """Names this process to the marks; a subprocess of a test inherits the name and has another."""
    os.environ[PID] = str(os.getpid())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the phases of a test."""
    _seconds[report.nodeid] += report.duration
    if report.outcome != "passed":
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Writes the tests that passed; workers of xdist leave that to their master."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["MARKS_SECONDS"], "w", encoding="utf-8") as file:
            for test, seconds in _seconds.items():
                if test not in _failed:
                    file.write(f"{test}\t{seconds:.3f}\n")
