"""The queue of requests that wait for admission, and their cancellation."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic

from recserve.core.errors import DeadlineExceeded, QueueFull
from recserve.core.request import (
    LikelihoodQuery,
    PrewarmQuery,
    PromptQuery,
    RankQuery,
    Request,
    Result,
    SlateQuery,
    TextScoreQuery,
)
from recserve.core.strategy import Strategy
from recserve.engine.runtime.scheduler import (
    MethodT,
    RequestT,
    ResultT,
    Scheduler,
    expired,
)
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.drafter import Drafter

MAX_RETRY_AFTER_S = 60.0
TURN_S = 0.5  # each further group of texts of one body counts as if it came so much later


@dataclass
class QueuedRequest(Generic[RequestT, ResultT, MethodT]):
    """A submitted request.

    Attributes:
        request: The request.
        future: Gets the result or the error.
        submitted_s: time.monotonic() of the submission.
        scheduler: The scheduler that runs the request.
        method: The strategy or drafter that computes it.
        background: Whether nobody waits for the result.
    """

    request: RequestT
    future: Future[ResultT]
    submitted_s: float
    scheduler: Scheduler[RequestT, ResultT, MethodT, Any]
    method: MethodT
    background: bool = False

    def check(self) -> None:
        """Raises ValueError if the request cannot run even alone."""
        self.scheduler.check(self.request, self.method)

    def admit(self) -> bool:
        """Hands the request to its scheduler. Returns False while there is no capacity."""
        return self.scheduler.admit(self.request, self.future, self.submitted_s, self.method)

    def fail(self, error: Exception) -> None:
        """Sets the request's future to an error."""
        self.scheduler.fail(self.future, error)


QueuedItems = QueuedRequest[Request, Result, Strategy]
QueuedText = QueuedRequest[TextQuery, Completion, Drafter]


class RequestQueue:
    """A bounded queue, ordered by priority and then by age.

    Background requests come last. As many of them may wait as of all others.

    Attributes:
        capacity: Most waiting requests, of both kinds each.
        background: Background requests that wait, oldest first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: deque[QueuedItems | QueuedText] = deque()
        self.background: deque[QueuedItems | QueuedText] = deque()
        self._begun: QueuedItems | QueuedText | None = None
        self._departures = Departures()

    def __len__(self) -> int:
        """Returns the number of waiting requests, without background ones."""
        return len(self._entries)

    @property
    def num_background_begun(self) -> int:
        """Number of background requests that run, at most one."""
        return int(self._begun is not None and not self._begun.future.done())

    def check(self, others: int = 0) -> None:
        """Raises QueueFull if the queue is full, or would be with so many others."""
        if (waiting := len(self._entries) + others) >= self.capacity:
            retry_after_s = self._departures.seconds_for(waiting, time.monotonic())
            raise QueueFull(f"{self.capacity} requests are waiting already", retry_after_s)

    def enqueue(self, entry: QueuedItems | QueuedText) -> None:
        """Adds a request. Raises QueueFull if the queue is full."""
        if entry.background:
            if len(self.background) >= self.capacity:
                raise QueueFull(f"{self.capacity} requests are waiting already", TURN_S)
            self.background.append(entry)
            return
        self.check()
        self._entries.append(entry)

    def drain(self, error: Exception) -> None:
        """Fails all requests."""
        for entries in (self._entries, self.background):
            while entries:
                entries.popleft().fail(error)

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
        for entry in sorted(entries, key=_turn):
            if entry.future.cancelled():
                continue
            if expired(entry.request):
                entry.fail(DeadlineExceeded("the deadline passed in the queue"))
                continue
            scheduler = entry.scheduler
            free = scheduler.num_running < max_running and not scheduler.isolating
            if free and id(scheduler) not in full:
                try:
                    admitted = entry.admit()
                except Exception as error:
                    entry.fail(error)
                    continue
                if admitted:
                    continue
            full.add(id(scheduler))
            left.append(entry)
        self._departures.add(len(entries) - len(left), time.monotonic())
        self._entries.extendleft(reversed(left))

    def admit_background(self) -> None:
        """Moves the oldest background request to its scheduler, if its pages are free."""
        while self.background:
            entry = self.background.popleft()
            if entry.future.cancelled():
                continue
            if expired(entry.request):
                entry.fail(DeadlineExceeded("the deadline passed in the queue"))
                continue
            try:
                admitted = not entry.scheduler.isolating and entry.admit()
            except Exception as error:
                entry.fail(error)
                continue
            if admitted:
                self._begun = entry
            else:
                self.background.appendleft(entry)
            return


class Departures:
    """How fast requests leave the queue: admitted, late or cancelled.

    Attributes:
        window_s: Length of the past that the estimate looks at.
    """

    window_s = 5.0

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()
        self._num_recent = 0

    def add(self, count: int, now_s: float) -> None:
        """Notes that requests have left the queue."""
        if count:
            self._recent.append((now_s, count))
            self._num_recent += count
        self._forget(now_s)

    def seconds_for(self, waiting: int, now_s: float) -> float:
        """Returns the seconds in which half of the waiting requests leave, at the recent rate.

        By then the queue has room, for other clients too. Without a recent departure it is the
        length of the window.
        """
        self._forget(now_s)
        if not self._recent:
            return self.window_s
        seconds = max(now_s - self._recent[0][0], 0.05)
        return min(waiting / 2 * seconds / self._num_recent, MAX_RETRY_AFTER_S)

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - self.window_s:
            self._num_recent -= self._recent.popleft()[1]


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


def _turn(entry: QueuedItems | QueuedText) -> tuple[int, float]:
    """Returns the priority and the age; a large body's later groups give way to other bodies."""
    request, submitted_s = entry.request, entry.submitted_s
    if isinstance(request, TextQuery):
        return request.priority, submitted_s
    if isinstance(request, TextScoreQuery | PromptQuery):
        return 0, submitted_s + request.group * TURN_S
    return 0, submitted_s


def model_and_method(request: Request | TextQuery) -> tuple[str, str]:
    """Returns the names of the request's model and of its strategy or drafter."""
    match request:
        case SlateQuery():
            return "recommender", request.strategy
        case LikelihoodQuery():
            return "recommender", "likelihood"
        case RankQuery():
            return "ranker", "ranker"
        case PrewarmQuery():
            return request.model, "warm"
        case TextScoreQuery():
            return "text_scores", "text_scores"
        case PromptQuery():
            return "text_scores", "prompt_scores"
        case TextQuery():
            return "text", request.speculation.drafter
