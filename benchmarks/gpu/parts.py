"""Benchmark parts in separate processes, so that a crash of one part does not affect the others.

A kernel that reads out of bounds breaks every later CUDA call of its process, and a kernel that
never ends blocks it. So each part runs in a child process. The child prints one line before each
row it starts and one line with the finished row. The parent keeps finished rows whatever happens to
the child. Several children may run concurrently, because compiling a kernel mostly uses one core.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

BEGUN, FOUND = "BEGUN ", "FOUND "
DEAD = 3  # exit code of a child whose device fails; its last row reports the failure
DEATHS = 4  # crashes after which a part is abandoned
GRACE_S = 15.0  # additional time for a row that started before the deadline
TAIL = 600  # characters of a child's stderr that are reported
QUIET_S = 0.5  # time to read the remaining output of a child that has ended


def begun(name: str) -> None:
    """Announces in the child that the row with this name starts."""
    print(BEGUN + name, flush=True)


def found(row: dict[str, Any]) -> None:
    """Prints a finished row in the child."""
    print(FOUND + json.dumps(row), flush=True)


def rows_of(command: list[str], name: str, seconds: float, again: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of a child, and one row that is not `ok` for each crash.

    The child ends after `seconds` and GRACE_S at the latest. A measurement that is unfinished then
    is marked `cut`.

    Args:
        command: Command that starts the child. The number of rows to skip and the seconds are
            appended.
        name: Name of the part.
        seconds: Time limit.
        again: True starts another child after the row in which one crashed; False gives up the
            rest.
    """
    until = time.monotonic() + seconds
    rows, deaths = 0, 0
    while True:
        left = max(until - time.monotonic(), 0.0)
        options = ["--skip", str(rows), "--seconds", str(left)]
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            child = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True
            )
            current, told = f"{name}, its start", False
            for line in _lines(child, until + GRACE_S):
                if line.startswith(BEGUN):
                    current, told = line.removeprefix(BEGUN).strip(), True
                elif line.startswith(FOUND):
                    rows, current, told = rows + 1, "", False
                    yield json.loads(line.removeprefix(FOUND))
            late = child.poll() is None
            child.kill()
            code = child.wait()
            errors.seek(0)
            note = f"killed after {left + GRACE_S:.0f} s" if late else f"exit {code}"
            note = f"{note}: {errors.read()[-TAIL:].strip()}"
        if code == 0:
            return
        deaths += 1
        if current or not (late or code == DEAD):
            rows += told
            yield {"name": current or f"{name}, behind row {rows}", "ok": False, "note": note}
        if late and not again:
            yield {"cut": name, "note": note}
        if not again or late or deaths == DEATHS or not (told or code == DEAD):
            lost = {"name": f"{name}, what was left of it", "ok": False, "note": note}
            yield from [lost] if again or code == DEAD else []
            return


def _lines(child: subprocess.Popen[str], until: float) -> Iterator[str]:
    """Yields the lines of a child until it ends or the time is up.

    A process that the child started may hold its end of the pipe for longer.
    """
    lines: SimpleQueue[str | None] = SimpleQueue()

    def pump(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    assert child.stdout is not None
    Thread(target=pump, args=(child.stdout,), daemon=True).start()
    while True:
        left = until - time.monotonic()
        try:
            line = lines.get(timeout=max(min(left, QUIET_S), 0.0))
        except Empty:
            if left <= 0 or child.poll() is not None:
                return
            continue
        if line is None:
            # The pipe closes shortly before the child has exited.
            while child.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            return
        yield line


def side_by_side(jobs: list[Callable[[], Iterator[Any]]], workers: int) -> Iterator[Any]:
    """Runs jobs concurrently and yields their results as they arrive.

    At most `workers` jobs run at a time. An exception of a job is raised at the end.
    """
    found: SimpleQueue[Any] = SimpleQueue()
    done = object()

    def drain(job: Callable[[], Iterator[Any]]) -> None:
        try:
            for row in job():
                found.put(row)
        finally:
            found.put(done)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(drain, job) for job in jobs]
        left = len(jobs)
        while left:
            row = found.get()
            if row is done:
                left -= 1
            else:
                yield row
        for future in futures:
            future.result()
