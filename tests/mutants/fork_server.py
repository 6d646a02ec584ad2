"""Starts pytest in forks of a process that has imported the large libraries once.

It spares each mutant three processor seconds. Forks import `recserve` and `tests` themselves, so
each has the code that stands in the folder then. A line of the input is a JSON list: the file for
the output, then the arguments of pytest. The answers to it are two lines: the id of the fork, then
its status as `os.wait4` gives it and its processor seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence

LIBRARIES = ("numpy", "torch", "fastapi", "httpx", "uvicorn", "pytest")


def serve() -> int | None:
    """Answers all lines. Returns the exit status of pytest in a fork, and None in the server."""
    for name in LIBRARIES:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        output, *arguments = json.loads(line)
        fork = os.fork()
        if not fork:
            return run(output, arguments)
        print(fork, flush=True)
        _, status, usage = os.wait4(fork, 0)
        print(f"{status} {usage.ru_utime + usage.ru_stime:.1f}", flush=True)
    return None


def run(output: str, arguments: Sequence[str]) -> int:
    """Runs pytest in a process group, so that it can be ended with all that it starts."""
    import pytest

    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    return int(pytest.main(list(arguments)))


if __name__ == "__main__":
    sys.exit(serve())
