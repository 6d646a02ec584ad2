"""Computes parts in Ray actors, on this machine or on a cluster.

This is the only file of the package that imports Ray. Each actor opens the models and writes parts,
so the output folder and the input must lie on a file system that all machines share.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from recserve.batch.part import Advance, JobPart, Step, write_part
from recserve.batch.processes import WorkerFailed
from recserve.batch.recipe import Recipe, WrongOption, environment, from_json, to_json
from recserve.batch.source import Partition

NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}


class PartActor:
    """Opens the models and writes parts; one runs in each actor process."""

    def __init__(self, recipe: str) -> None:
        """Stores the recipe, given as JSON."""
        self._recipe, self._open = recipe, ExitStack()

    def facts(self) -> dict[str, object]:
        """Opens the models and returns what determines the output besides the input."""
        self._task = self._open.enter_context(from_json(self._recipe).open())
        return self._task.facts

    def write(self, partition: dict[str, Any], folder: str) -> dict[str, Any]:
        """Writes one part and returns its line of the manifest."""
        steps = write_part(self._task, Partition(**partition), Path(folder))
        return [asdict(step) for step in steps if isinstance(step, JobPart)][0]


class RayWorkers:
    """Computes parts in Ray actors.

    Attributes:
        recipe: What each actor opens.
        num_workers: Number of actors, at least 1.
        address: Address of a running cluster; None starts one on this machine.
    """

    def __init__(self, recipe: Recipe, num_workers: int = 1, address: str | None = None) -> None:
        self.recipe, self.num_workers, self.address = recipe, num_workers, address
        self._actors: list[Any] = []
        self._ready: Mapping[str, object] = {}

    @property
    def suffix(self) -> str:
        """Suffix of the output files."""
        return self.recipe.suffix

    @property
    def facts(self) -> Mapping[str, object]:
        """What determines the output besides the input, known before the models are open."""
        return self.recipe.facts()

    def open(self, lock: int) -> Mapping[str, object]:
        """Connects to the cluster, starts the first actor and returns what its models are.

        Raises:
            WrongOption: If an option does not fit the models.
            WorkerFailed: If the models cannot be opened.
        """
        os.environ.update(NO_STATISTICS)
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**environment(self.recipe), "PYTHONPATH": os.pathsep.join(paths)}
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        options: dict[str, Any] = {"num_cpus": self.num_workers, "include_dashboard": False}
        ray.init(
            address=self.address or "local",
            runtime_env={"env_vars": variables},
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if self.address else options),
        )
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray has replaced them
        self._start()
        self._ready = self._get(self._actors[0].facts.remote())
        return self._ready

    def run(self, partitions: Sequence[Partition], folder: Path) -> Iterator[Step]:
        """Computes partitions; each actor receives the next one when it is ready.

        Raises:
            WorkerFailed: If an actor ends or fails.
        """
        todo = deque(partitions)
        while len(self._actors) < min(self.num_workers, len(todo)):
            self._start()
        running: dict[Any, Any] = {}
        if todo:
            running[self._order(self._actors[0], todo.popleft(), folder)] = self._actors[0]
        for actor in self._actors[1:]:
            running[actor.facts.remote()] = actor
        while running:
            (ready,), _ = ray.wait(list(running), num_returns=1)
            actor = running.pop(ready)
            result = self._get(ready)
            if "part" in result:
                part = JobPart(**result)
                yield Advance(part.users, part.errors)
                yield part
            elif result != self._ready:
                raise WorkerFailed("the bundle or its catalogue has changed while the job ran")
            if todo:
                running[self._order(actor, todo.popleft(), folder)] = actor

    def close(self) -> None:
        """Ends the actors, and the cluster if this object has started it."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if ray.is_initialized():
            ray.shutdown()

    def _order(self, actor: Any, partition: Partition, folder: Path) -> Any:
        return actor.write.remote(asdict(partition), str(folder.resolve()))

    def _start(self) -> None:
        gpus = 0.0
        if self.recipe.device != "cpu":  # Ray hides all GPUs from an actor that asks for none
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            gpus = min(resources.get("GPU", 0.0) / self.num_workers, 1.0)
        remote: Any = ray.remote(num_cpus=1, num_gpus=gpus)(PartActor)
        self._actors.append(remote.remote(to_json(self.recipe)))

    def _get(self, reference: Any) -> dict[str, Any]:
        """Waits for a result. Raises what the actor raised."""
        try:
            result: dict[str, Any] = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            kind = WrongOption if isinstance(cause, WrongOption) else WorkerFailed
            raise kind(str(cause)) from None
        except ray.exceptions.RayActorError as error:
            raise WorkerFailed(f"a Ray actor ended: {error}") from None
        return result
