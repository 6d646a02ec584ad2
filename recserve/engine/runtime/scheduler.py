"""The base class of schedulers, the lock of a step, and the delivery of results."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from typing import Generic, Protocol, TypeVar

from recserve.core.request import DeadlineExceeded, Timing
from recserve.engine.runtime.pages import PageAllocator
from recserve.engine.runtime.prefix_cache import PrefixCache

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


class PageOwner(Protocol):
    """The pages of one model, which several schedulers may share.

    Attributes:
        allocator: Free pages of the model's key-value pool.
        cache: Prefix cache over the same pages.
    """

    allocator: PageAllocator
    cache: PrefixCache


class Scheduler(ABC, Generic[RequestT, ResultT, MethodT]):
    """Admits the requests of one model, steps them, and releases them. A scheduler is a
    PageOwner.

    MethodT computes a request: it is a Strategy for items and a Drafter for text.
    """

    allocator: PageAllocator
    cache: PrefixCache

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Number of requests that are admitted and have no result."""

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
    def drop_all(self) -> Seq[RunningRequest[ResultT]]:
        """Removes and returns all running requests."""

    @abstractmethod
    def drop_cancelled(self) -> None:
        """Removes cancelled requests."""

    def run_step(self) -> int:
        """Runs one step and delivers its results. Returns the number of results.

        An exception in the forward pass becomes the result of every running request.
        """
        done = self.begin()
        for running, result in done:
            deliver(running, result)
        try:
            stepped = self.step()
        except Exception as error:
            log.exception("a step failed")
            for running in self.drop_all():
                fail(running.future, error)
            return len(done)
        for running, result in stepped:
            deliver(running, result)
        return len(done) + len(stepped)


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
