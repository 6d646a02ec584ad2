"""A plug-in of pytest that notes how long each test takes, and which process runs the tests."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

from tests.mutants.marks import PID

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
