"""Parts of a benchmark in processes of their own: what one loses, the others keep.

A kernel that reads where it must not ends every later call of its process with the same error, and
one that never ends would end nothing. So each part runs in a child, which writes a line for each
row it is about to find and one for the row; rows that came are kept, whatever becomes of the child.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

BEGUN, FOUND = "BEGUN ", "FOUND "
DEATHS = 4  # after which a part is given up
GRACE_S = 15.0  # for its start, and for a row that began in time


def begun(name: str) -> None:
    """In the child: the next row has this name."""
    print(BEGUN + name, flush=True)


def found(row: dict[str, Any]) -> None:
    """In the child: a row."""
    print(FOUND + json.dumps(row), flush=True)


def rows_of(command: list[str], name: str, seconds: float, again: bool) -> Iterator[dict[str, Any]]:
    """Rows that a child found, and one that is not `ok` for each time it died.

    command: what starts the child; the rows to leave out and its seconds are added. again: where it
    dies, another goes on behind the row that killed it; else what is left is lost.
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
            stopper = threading.Timer(left + GRACE_S, child.kill)
            stopper.start()
            current = f"{name}, its start"
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(BEGUN):
                    current = line.removeprefix(BEGUN).strip()
                elif line.startswith(FOUND):
                    rows, current = rows + 1, ""
                    yield json.loads(line.removeprefix(FOUND))
            code = child.wait()
            late = stopper.finished.is_set()
            stopper.cancel()
            errors.seek(0)
            note = f"killed after {left + GRACE_S:.0f} s" if late else f"exit {code}"
            tail = errors.read()[-400:].strip()
        if code == 0:
            return
        deaths += 1
        if current:
            rows += 1
            yield {"name": current, "ok": False, "note": f"{note}: {tail}"}
        if not again or late or deaths == DEATHS:
            lost = {"name": f"{name}, what was left of it", "ok": False, "note": note}
            yield from [lost] if again else []
            return


def this_file(path: str, *arguments: str) -> list[str]:
    """The command that runs a file with this interpreter."""
    return [sys.executable, path, *arguments]
