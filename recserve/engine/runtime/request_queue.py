"""The queue of requests that wait for admission, and their cancellation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic

from recserve.core.request import DeadlineExceeded, QueueFull, Request, Result
from recserve.core.strategy import Strategy
from recserve.engine.runtime.scheduler import (
    MethodT,
    RequestT,
    ResultT,
    Scheduler,
    expired,
    fail,
)
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.drafter import Drafter


@dataclass
class QueuedRequest(Generic[RequestT, ResultT, MethodT]):
    """A submitted request.

    Attributes:
        request: The request.
        future: Gets the result or the error.
        submitted_s: time.monotonic() of the submission.
        scheduler: The scheduler that runs the request.
        method: The strategy or drafter that computes it.
    """

    request: RequestT
    future: Future[ResultT]
    submitted_s: float
    scheduler: Scheduler[RequestT, ResultT, MethodT]
    method: MethodT

    def check(self) -> None:
        """Raises ValueError if the request cannot run even alone."""
        self.scheduler.check(self.request, self.method)

    def admit(self) -> bool:
        """Hands the request to its scheduler. Returns False while there is no capacity."""
        return self.scheduler.admit(self.request, self.future, self.submitted_s, self.method)

    def fail(self, error: Exception) -> None:
        """Sets the request's future to an error."""
        fail(self.future, error)


QueuedItems = QueuedRequest[Request, Result, Strategy]
QueuedText = QueuedRequest[TextQuery, Completion, Drafter]


class RequestQueue:
    """A bounded queue, ordered by priority and then by age."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: deque[QueuedItems | QueuedText] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueuedItems | QueuedText]:
        return iter(list(self._entries))

    def enqueue(self, entry: QueuedItems | QueuedText, seconds_per_request: float) -> None:
        """Adds a request.

        Args:
            entry: The request.
            seconds_per_request: Current service time, for the error's `retry_after_s`.

        Raises:
            QueueFull: If the queue is full.
        """
        if len(self._entries) >= self.capacity:
            retry_after_s = len(self._entries) * seconds_per_request
            raise QueueFull(f"{self.capacity} requests are waiting already", retry_after_s)
        self._entries.append(entry)

    def admit(self, max_running: int) -> None:
        """Moves requests to their schedulers, by priority and then by age.

        A request that finds no capacity blocks the later requests of the same scheduler. Small
        requests therefore cannot starve a large one.

        Args:
            max_running: Most requests that a scheduler runs at once.
        """
        full: set[int] = set()
        left: list[QueuedItems | QueuedText] = []
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        for entry in sorted(entries, key=_priority):
            if entry.future.cancelled():
                continue
            if expired(entry.request):
                entry.fail(DeadlineExceeded("the deadline passed in the queue"))
                continue
            scheduler = entry.scheduler
            if id(scheduler) not in full and scheduler.num_running < max_running:
                try:
                    admitted = entry.admit()
                except Exception as error:
                    entry.fail(error)
                    continue
                if admitted:
                    continue
            full.add(id(scheduler))
            left.append(entry)
        self._entries.extendleft(reversed(left))


class Cancellations:
    """Reports whether any future was cancelled, so that a step need not check every future."""

    def __init__(self) -> None:
        self._pending = False

    def watch(self, future: Future[ResultT]) -> Future[ResultT]:
        """Records the future's cancellation when it happens. Returns the same future."""
        future.add_done_callback(self._note)
        return future

    def _note(self, future: Future[ResultT]) -> None:
        if future.cancelled():
            self._pending = True

    def take(self) -> bool:
        """Returns whether a future was cancelled since the last call."""
        if not self._pending:
            return False
        # Reset before the caller looks at the futures: a later cancellation sets it again.
        self._pending = False
        return True


def _priority(entry: QueuedItems | QueuedText) -> int:
    return entry.request.priority if isinstance(entry.request, TextQuery) else 0
