"""A process that computes parts of a job. `processes.py` starts it and talks to it.

It reads lines of JSON: first the recipe, then one line per partition. It writes lines of JSON: what
the models are, then the progress and the result of each partition. It ends when its input ends, so
it does not outlive the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from recserve.batch.part import Advance, write_part
from recserve.batch.recipe import WrongOption, from_json
from recserve.batch.source import Partition

EXPECTED = (ValueError, LookupError, OSError, RuntimeError)


def main() -> None:
    """Runs until the input ends."""
    # Only messages go to the original output; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_receive, args=(lines,), daemon=True).start()
    try:
        with from_json(lines.get()).open() as task:
            _say(answers, ready=task.facts)
            while True:
                order = json.loads(lines.get())
                partition = Partition(**order["partition"])
                for step in write_part(task, partition, Path(order["folder"])):
                    kind = "advance" if isinstance(step, Advance) else "part"
                    _say(answers, **{kind: asdict(step)})
    except Exception as error:
        told = str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
        _say(answers, failed=told, usage=isinstance(error, WrongOption))
        sys.exit(1)


def _receive(lines: queue.Queue[str]) -> None:
    """Queues the input, and ends the process at its end."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _say(answers: TextIO, **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
