"""Computes parts in worker processes on this machine."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recserve.batch.part import Advance, JobPart, Step
from recserve.batch.recipe import Recipe, WrongOption, environment, to_json
from recserve.batch.source import Partition

END_WAIT_S = 5.0
KILL_WAIT_S = 10.0


class WorkerFailed(RuntimeError):
    """A worker process ended or reported an error."""


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[str]

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its end arrives as a message


class LocalWorkers:
    """Computes parts in processes that each open the models.

    Attributes:
        recipe: What each process opens.
        num_workers: Most processes, at least 1.

    Raises:
        ValueError: If `num_workers` is below 1.
    """

    def __init__(self, recipe: Recipe, num_workers: int = 1) -> None:
        if num_workers < 1:
            raise ValueError(f"workers is {num_workers}; expected at least 1")
        self.recipe, self.num_workers = recipe, num_workers
        self._workers: list[_Worker] = []
        self._messages: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self._ready: Mapping[str, object] = {}
        self._lock = -1

    @property
    def suffix(self) -> str:
        """Suffix of the output files."""
        return self.recipe.suffix

    @property
    def facts(self) -> Mapping[str, object]:
        """What determines the output besides the input, known before the models are open."""
        return self.recipe.facts()

    def open(self, lock: int) -> Mapping[str, object]:
        """Starts the first process and returns what its models are.

        The others start afterwards, because the first one may fill an empty history store.

        Raises:
            WrongOption: If an option does not fit the models.
            WorkerFailed: If the models cannot be opened.
        """
        self._lock = lock
        worker = self._start()
        self._ready = self._next()[1]["ready"]
        assert worker in self._workers
        return self._ready

    def run(self, partitions: Sequence[Partition], folder: Path) -> Iterator[Step]:
        """Computes partitions; each process receives the next one when it is ready.

        Raises:
            WorkerFailed: If a process ends or fails.
        """
        todo = deque(partitions)
        left = len(todo)
        if todo:
            self._order(self._workers[0], todo.popleft(), folder)
        for _ in range(min(self.num_workers - 1, len(todo))):
            self._start()
        while left:
            worker, message = self._next()
            if "advance" in message:
                yield Advance(**message["advance"])
                continue
            if "part" in message:
                left -= 1
                yield JobPart(**message["part"])
            elif message["ready"] != self._ready:
                raise WorkerFailed("the bundle or its catalogue has changed while the job ran")
            if todo:
                self._order(worker, todo.popleft(), folder)

    def close(self) -> None:
        """Ends all processes.

        On a busy machine, even a killed process takes its time. One that a driver or a disk holds
        in the kernel is not waited for longer than KILL_WAIT_S.
        """
        for worker in self._workers:
            worker.process.kill()
        latest_s = time.monotonic() + KILL_WAIT_S
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, latest_s - time.monotonic()))
        self._workers.clear()

    def _start(self) -> _Worker:
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "recserve.batch.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={
                **os.environ,
                **environment(self.recipe),
                "PYTHONPATH": os.pathsep.join(paths),
            },
            # The lock of the output folder ends with the last process that writes there.
            pass_fds=(self._lock,),
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the others
        )
        worker = _Worker(process)
        self._workers.append(worker)
        worker.send(to_json(self.recipe))
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self._messages.put((worker, json.loads(line)))
        self._messages.put((worker, None))

    def _next(self) -> tuple[_Worker, dict[str, Any]]:
        """Waits for the next message. Raises what a worker reports."""
        worker, message = self._messages.get()
        if message is None:
            try:
                status = worker.process.wait(END_WAIT_S)
                told = f"ended with {f'signal {-status}' if status < 0 else f'status {status}'}"
            except subprocess.TimeoutExpired:
                told = f"says nothing any more, and did not end within {END_WAIT_S:g} s"
            raise WorkerFailed(f"a worker process {told}; run the same command again to continue")
        if "failed" in message:
            raise (WrongOption if message["usage"] else WorkerFailed)(message["failed"])
        return worker, message

    def _order(self, worker: _Worker, partition: Partition, folder: Path) -> None:
        worker.send(json.dumps({"partition": asdict(partition), "folder": str(folder.resolve())}))
