"""Parts of a benchmark in processes of their own: what one loses, the others keep.

A kernel that reads where it must not ends every later call of its process with the same error, and
one that never ends would end nothing. So each part runs in a child, which writes a line for each
row it is about to find and one for the row; rows that came are kept, whatever becomes of the child.
Several children may run side by side: what takes long is mostly one core's, compiling a kernel.
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
DEAD = 3  # how a child ends whose device answers nothing any more, behind the row that tells so
DEATHS = 4  # after which a part is given up
GRACE_S = 15.0  # behind its seconds, for a row that began in time
TAIL = 600  # characters of what a child wrote to its stderr
QUIET_S = 0.5  # after which a child that has ended has nothing more to say


def begun(name: str) -> None:
    """In the child: the next row has this name."""
    print(BEGUN + name, flush=True)


def found(row: dict[str, Any]) -> None:
    """In the child: a row."""
    print(FOUND + json.dumps(row), flush=True)


def rows_of(command: list[str], name: str, seconds: float, again: bool) -> Iterator[dict[str, Any]]:
    """Rows that a child found, and one that is not `ok` for each time it died. It ends after the
    seconds and GRACE_S, whatever becomes of it; a measurement that did not is `cut`.

    command: what starts the child; the rows to leave out and its seconds are added. again: where it
    dies in a row that it had begun, another goes on behind that row; else what is left is lost.
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
    """What a child writes before it ends or the time is up; what it has started may hold its end of
    the pipe for longer.
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
            # The pipe is closed a moment before the child is gone.
            while child.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            return
        yield line


def side_by_side(jobs: list[Callable[[], Iterator[Any]]], workers: int) -> Iterator[Any]:
    """What jobs find, as it comes, so many of them at a time; in the end what one has raised."""
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
