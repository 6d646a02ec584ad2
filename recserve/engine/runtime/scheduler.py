"""The base class of schedulers, the lock of a step, and the delivery of results."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from recserve.core.errors import DeadlineExceeded
from recserve.core.request import Timing
from recserve.engine.kv_cache import KVCache
from recserve.engine.runtime.runner import Runner

log = logging.getLogger(__name__)


class HasDeadline(Protocol):
    """A request that may have a deadline.

    Attributes:
        deadline_s: Value of time.monotonic() after which the result is useless. None means never.
    """

    @property
    def deadline_s(self) -> float | None:
        """Value of time.monotonic() after which the result is useless."""
        ...


RequestT = TypeVar("RequestT", bound=HasDeadline)
ResultT = TypeVar("ResultT")
MethodT = TypeVar("MethodT")


class RequestTooLarge(ValueError):
    """A request needs more pages than the pool has, even when nothing else runs."""


class RunningRequest(Protocol[ResultT]):
    """A request between admission and result, such as core/sequence.py's `Sequence`."""

    submitted_s: float
    timing: Timing

    @property
    def request(self) -> HasDeadline:
        """The request."""
        ...

    @property
    def future(self) -> Future[ResultT]:
        """Gets the result."""
        ...


@dataclass(frozen=True)
class Dropped(Generic[ResultT]):
    """A request that was removed from a scheduler without a result.

    Attributes:
        running: The request. It holds no pages.
        readmit: Starts it again from what it has committed. Returns False if pages are missing.
    """

    running: RunningRequest[ResultT]
    readmit: Callable[[], bool]


class Scheduler(ABC, Generic[RequestT, ResultT, MethodT]):
    """Admits the requests of one model, steps them, and releases them.

    MethodT computes a request: it is a Strategy for items and a Drafter for text.

    After a step that fails, every request of the step is a suspect. Each suspect is tried alone, so
    that a request that makes the forward pass fail does not fail its neighbours. Those that step
    alone without an error are cleared, and they continue together when all have been tried.

    Attributes:
        runner: Runs the model.
        kv: Pages and cached prefixes of the model. Several schedulers may share them.
    """

    runner: Runner
    kv: KVCache

    def __init__(self) -> None:
        self._suspects: deque[Dropped[ResultT]] = deque()
        self._cleared: deque[Dropped[ResultT]] = deque()

    @property
    def num_running(self) -> int:
        """Number of requests that were admitted and have no result."""
        return self.num_admitted + len(self._suspects) + len(self._cleared)

    @property
    def isolating(self) -> bool:
        """Whether suspects are tried one by one. No other request may be admitted meanwhile."""
        return bool(self._suspects or self._cleared)

    @property
    @abstractmethod
    def num_admitted(self) -> int:
        """Number of running requests that have pages or wait for them."""

    @abstractmethod
    def check(self, request: RequestT, method: MethodT, /) -> None:
        """Raises ValueError if the request cannot run, even alone."""

    @abstractmethod
    def admit(
        self, request: RequestT, future: Future[ResultT], submitted_s: float, method: MethodT, /
    ) -> bool:
        """Takes a request in. Returns False if other requests hold the pages that it needs."""

    @abstractmethod
    def begin(self) -> Seq[tuple[RunningRequest[ResultT], ResultT | Exception]]:
        """Returns the results that need no forward pass."""

    @abstractmethod
    def step(self) -> Seq[tuple[RunningRequest[ResultT], ResultT | Exception]]:
        """Runs one forward pass over all running requests. Returns the results that it
        completes.
        """

    @abstractmethod
    def drop_all(self) -> Seq[Dropped[ResultT]]:
        """Removes and returns all admitted requests."""

    @abstractmethod
    def drop_cancelled(self) -> None:
        """Removes cancelled requests."""

    def pause(self) -> Seq[Dropped[ResultT]]:
        """Removes and returns requests that can continue later from what they have computed.

        None by default: requests that end within a few steps run to their end.
        """
        return ()

    def run_step(self) -> int:
        """Runs one step and delivers its results. Returns the number of results.

        Raises:
            DeviceLost: If the step failed and no later one can succeed.
        """
        if self.isolating and not self.num_admitted:
            self._readmit()
        done: Seq[tuple[RunningRequest[ResultT], ResultT | Exception]] = ()
        stepped = done
        try:
            done = self.begin()
            for running, result in done:
                deliver(running, result)
            stepped = self.step()
        except Exception as error:
            log.exception("a step failed")
            self._isolate(self.drop_all(), error)
            self.runner.check_device()
            return len(done)
        for running, result in stepped:
            deliver(running, result)
        if self.isolating:
            self._cleared.extend(self.pause())
        return len(done) + len(stepped)

    def abandon(self, error: Exception) -> None:
        """Fails all running requests."""
        dropped = [*self._suspects, *self._cleared, *self.drop_all()]
        self._suspects.clear()
        self._cleared.clear()
        for one in dropped:
            fail(one.running.future, error)

    def _isolate(self, dropped: Seq[Dropped[ResultT]], error: Exception) -> None:
        """Makes the requests of a failed step suspects. A request that failed alone gets the
        error.
        """
        if len(dropped) == 1:
            fail(dropped[0].running.future, error)
        else:
            self._suspects.extend(dropped)

    def _readmit(self) -> None:
        """Starts the next suspect, or all cleared requests if no suspect is left."""
        waiting, most = (self._suspects, 1) if self._suspects else (self._cleared, None)
        while waiting and (most is None or self.num_admitted < most):
            one = waiting.popleft()
            if one.running.future.cancelled():
                continue
            try:
                admitted = one.readmit()
            except Exception as error:
                fail(one.running.future, error)
                continue
            if not admitted:
                waiting.appendleft(one)
                return


class StepLock:
    """A fair lock with room for one waiter. The engine holds it during a step.

    Changes between two steps take it too. With a plain lock, the releasing thread often takes the
    lock again before the waiting thread wakes. A busy engine could then run twenty steps before a
    root is dropped.
    """

    def __init__(self) -> None:
        self._line, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._line:
            self._held.acquire()

    def __exit__(self, *raised: object) -> None:
        self._held.release()


def expired(request: HasDeadline) -> bool:
    """Returns whether the request's deadline has passed."""
    return request.deadline_s is not None and time.monotonic() > request.deadline_s


def deliver(running: RunningRequest[ResultT], result: ResultT | Exception) -> None:
    """Sets the request's future to its result, or to an exception."""
    if isinstance(result, Exception):
        fail(running.future, result)
        return
    running.timing.total_ms = (time.monotonic() - running.submitted_s) * 1e3
    if expired(running.request):
        fail(running.future, DeadlineExceeded("the deadline passed while the request ran"))
        return
    try:
        running.future.set_result(result)
    except InvalidStateError:
        log.debug("a result is ready after its request was cancelled")


def fail(future: Future[ResultT], error: Exception) -> None:
    """Sets the future to an exception."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        log.debug("a request was cancelled before its error: %s", error)
