"""Faults of a Redis that replicas share, made while clients send."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.campaign.check import NotRun
from benchmarks.campaign.fault_proxy import FaultProxy
from tests.support.redis_server import servers, start_redis

ALWAYS = ("--appendonly", "yes", "--appendfsync", "always", "--no-appendfsync-on-rewrite", "no")
NETWORK = ("down", "refuse", "hang", "loss", "reset", "half", "garbage")


@dataclass(frozen=True)
class Plan:
    """How much a run does.

    Attributes:
        operations: Operations of all clients.
        faults: Faults, evenly over the operations.
        seconds: Longest time; the run ends with fewer operations then.
        seed: Seed of what is drawn.
    """

    operations: int
    faults: int
    seconds: float
    seed: int = 0


class Client(Protocol):
    """A thread that sends until it is stopped."""

    stopped: threading.Event

    def start(self) -> None:
        """Starts the thread."""

    def close(self) -> None:
        """Ends the thread and closes its connections."""


class FaultyRedis:
    """One Redis that writes each change to its disk before it answers, behind a proxy per replica.

    Attributes:
        port: Its port without a proxy.
        proxies: The proxy of each replica.
        random: Draws what fails and for how long.
    """

    def __init__(self, folder: Path, num_replicas: int, random: np.random.Generator) -> None:
        self.folder, self.num_replicas, self.random = folder, num_replicas, random
        self.port, self.proxies = 0, list[FaultProxy]()
        self._stack = ExitStack()

    def __enter__(self) -> FaultyRedis:
        with ExitStack() as stack:
            self._started = stack.enter_context(servers())
            self._start()
            for number in range(self.num_replicas):
                self.proxies.append(stack.enter_context(FaultProxy(self.port, number)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def stores(self) -> list[str]:
        """The address of each replica's store."""
        return [f"redis://127.0.0.1:{one.port}/0" for one in self.proxies]

    def replica(self) -> int:
        """Draws a replica."""
        return int(self.random.integers(self.num_replicas))

    def kill(self, longest_s: float) -> None:
        """Ends Redis by force and starts it again after some time."""
        self._server.kill()
        self._server.wait()
        self._started.remove(self._server)
        time.sleep(float(self.random.uniform(0.0, longest_s)))
        self._start()

    def stop(self) -> None:
        """Stops Redis for some time."""
        pause(self._server.pid, float(self.random.uniform(0.3, 3)))

    def break_network(self, longest_s: float) -> None:
        """Breaks the network between Redis and some replicas for some time."""
        count = int(self.random.integers(1, self.num_replicas + 1))
        with ExitStack() as faults:
            for number in self.random.permutation(self.num_replicas)[:count]:
                faults.enter_context(self.proxies[number].fault(str(self.random.choice(NETWORK))))
            time.sleep(float(self.random.uniform(0.5, longest_s)))

    def _start(self) -> None:
        with redis_or_not_run():
            self._server, self.port = start_redis(self.folder, self.port, *ALWAYS)
        self._started.append(self._server)


def drive(
    clients: Sequence[Client],
    count: Callable[[], int],
    plan: Plan,
    faults: Sequence[tuple[str, Callable[[], object]]],
) -> Counter[str]:
    """Makes faults evenly while clients send; returns their number by kind.

    Args:
        clients: The clients, which are started and closed.
        count: Returns how much they have sent.
        plan: How much.
        faults: Kinds of faults, in turn; each call returns when the fault is over.
    """
    end, made = time.monotonic() + plan.seconds, Counter[str]()

    def sent(part: float) -> bool:
        return count() >= part * plan.operations or time.monotonic() > end

    for one in clients:
        one.start()
    try:
        for number, (name, fail) in zip(range(plan.faults), cycle(faults), strict=False):
            while not sent((number + 0.5) / plan.faults):
                time.sleep(0.02)
            if time.monotonic() > end:
                break
            fail()
            made[name] += 1
        while not sent(1.0):
            time.sleep(0.02)
    finally:
        for one in clients:
            one.stopped.set()
        for one in clients:
            one.close()
    return made


def pause(pid: int, seconds: float) -> None:
    """Stops a process for some time."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def redis_or_not_run() -> Iterator[Any]:
    """Raises NotRun where the body finds no redis-server."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError):
        raise
    except BaseException:  # pytest's skip and fail are no Exceptions
        raise NotRun("no redis-server on this machine") from None
