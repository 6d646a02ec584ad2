"""What the engine needs of a lane and of a running request, and how answers leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

from recserve.core.request import DeadlineExceeded, Timing
from recserve.engine.runtime.pages import PageAllocator
from recserve.engine.runtime.prefix_cache import PrefixCache

log = logging.getLogger(__name__)


class RequestTooLarge(ValueError):
    """A request needs more pages than the pool has, whatever else is running."""


class Running(Protocol):
    """A request between admission and answer: core/sequence.py, engine/text/text_sequence.py."""

    request: Any
    future: Future[Any]
    submitted_s: float
    timing: Timing


class AnyLane(Protocol):
    """One model's side of the engine: lane.py for items, text_lane.py for text.

    `how` is what the engine joins the request with: a Strategy, or a text Drafter.
    """

    allocator: PageAllocator
    cache: PrefixCache

    @property
    def num_running(self) -> int:
        """Requests admitted and not answered."""
        ...

    def check(self, request: Any, how: Any, /) -> None:
        """Raises ValueError if the request could not run even alone."""
        ...

    def admit(self, request: Any, future: Future[Any], submitted_s: float, how: Any, /) -> bool:
        """Take a request in if there is room now."""
        ...

    def begin(self) -> Seq[tuple[Running, Any]]:
        """Answers that need no forward."""
        ...

    def step(self) -> Seq[tuple[Running, Any]]:
        """One forward over everything that waits for one; the answers it completed."""
        ...

    def drop_all(self) -> Seq[Running]:
        """Forget everything that runs; the dropped requests are returned."""
        ...

    def drop_ended(self) -> None:
        """Stop the work of cancelled requests."""
        ...


class Cancellations:
    """Whether a future was cancelled: known by its call, so that nobody has to ask every future at
    every step.
    """

    def __init__(self) -> None:
        self._some = False

    def future(self) -> Future[Any]:
        """One that is watched."""
        future: Future[Any] = Future()
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._some = True

    def any(self) -> bool:
        """Whether one was since this was last asked."""
        if not self._some:
            return False
        # Before the caller looks at the futures: one that comes meanwhile is told again.
        self._some = False
        return True


def expired(request: Any) -> bool:
    """Whether the request's deadline has passed."""
    return request.deadline_s is not None and time.monotonic() > request.deadline_s


def deliver(sequence: Running, result: Any) -> None:
    """Set the request's future to its answer, or to the error that came instead."""
    if isinstance(result, Exception):
        fail(sequence.future, result)
        return
    sequence.timing.total_ms = (time.monotonic() - sequence.submitted_s) * 1e3
    if expired(sequence.request):
        fail(sequence.future, DeadlineExceeded("the deadline passed while the request ran"))
        return
    try:
        sequence.future.set_result(result)
    except InvalidStateError:
        log.debug("an answer came after its request was cancelled")


def fail(future: Future[Any], error: Exception) -> None:
    """Set the future to an error."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        log.debug("a request was cancelled before its error: %s", error)
