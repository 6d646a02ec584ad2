"""The queue of requests that wait for admission, and their cancellation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from recserve.core.errors import DeadlineExceeded, QueueFull
from recserve.core.request import (
    LikelihoodQuery,
    PrewarmQuery,
    PromptQuery,
    RankQuery,
    Request,
    SlateQuery,
    TextScoreQuery,
)
from recserve.core.sequence import Sequence
from recserve.engine.runtime.scheduler import TURN_S, Scheduler, expired, turn
from recserve.speculation.completion import TextQuery

ResultT = TypeVar("ResultT")
MAX_RETRY_AFTER_S = 60.0


class RequestQueue:
    """A bounded queue, ordered by priority and then by age.

    Background requests come last. As many of them may wait as of all others.

    Attributes:
        capacity: Most waiting requests, of both kinds each.
        waiting: Requests that wait, without background ones.
        background: Background requests that wait, oldest first.
    """

    def __init__(self, capacity: int, schedulers: Mapping[str, Scheduler[Any, Any]]) -> None:
        """Makes an empty queue for the requests of these schedulers, by model."""
        self.capacity, self.schedulers = capacity, schedulers
        self.waiting: deque[Sequence] = deque()
        self.background: deque[Sequence] = deque()
        self._begun: Sequence | None = None
        self._departures = Departures()

    def __len__(self) -> int:
        """Returns the number of waiting requests, without background ones."""
        return len(self.waiting)

    @property
    def num_background_begun(self) -> int:
        """Number of background requests that run, at most one."""
        return int(self._begun is not None and not self._begun.future.done())

    def check(self, others: int = 0) -> None:
        """Raises QueueFull if the queue is full, or would be with so many others."""
        if (waiting := len(self.waiting) + others) >= self.capacity:
            retry_after_s = self._departures.seconds_for(waiting, time.monotonic())
            raise QueueFull(f"{self.capacity} requests are waiting already", retry_after_s)

    def enqueue(self, sequence: Sequence) -> None:
        """Adds a request. Raises QueueFull if the queue is full."""
        if sequence.background:
            if len(self.background) >= self.capacity:
                raise QueueFull(f"{self.capacity} requests are waiting already", TURN_S)
            self.background.append(sequence)
            return
        self.check()
        self.waiting.append(sequence)

    def drain(self, error: Exception) -> None:
        """Fails all requests."""
        for sequences in (self.waiting, self.background):
            while sequences:
                self._fail(sequences.popleft(), error)

    def admit(self, max_running: int) -> None:
        """Moves requests to their schedulers, by priority and then by age.

        A request that finds no capacity blocks the later requests of the same scheduler. Small
        requests therefore cannot starve a large one. A running text that is served later gives its
        place to a waiting text, at most one to each, and waits here again. Running texts that are
        served later give their pages, as many as a waiting request needs.

        Args:
            max_running: Most requests that a scheduler runs at once.
        """
        full: set[str] = set()
        left: list[Sequence] = []
        displaced: list[Sequence] = []
        sequences = [self.waiting.popleft() for _ in range(len(self.waiting))]
        for sequence in sorted(sequences, key=turn):
            if self._left(sequence):
                continue
            if sequence.model not in full:
                try:
                    admitted = self._admit(sequence, max_running, displaced)
                except Exception as error:
                    self._fail(sequence, error)
                    continue
                if admitted:
                    continue
            full.add(sequence.model)
            left.append(sequence)
        self._departures.add(len(sequences) - len(left), time.monotonic())
        self.waiting.extendleft(reversed(left + displaced))

    def _admit(self, sequence: Sequence, max_running: int, displaced: list[Sequence]) -> bool:
        """Moves a request to its scheduler. Returns False if that has no capacity.

        A request that loses its place for it is added to `displaced`.
        """
        scheduler = self.schedulers[sequence.model]
        if scheduler.isolating:
            return False
        if scheduler.num_running >= max_running:
            last = scheduler.give_way(sequence)
            if last is None:
                return False
            displaced.append(last)
        if scheduler.admit(sequence):
            return True
        count = scheduler.pages_to_admit(sequence)
        sharers = [one for one in self.schedulers.values() if one.kv is scheduler.kv]
        freed = any([one.free_pages(count, sequence) for one in sharers])
        return freed and scheduler.admit(sequence)

    def admit_background(self) -> None:
        """Moves the oldest background request to its scheduler, if its pages are free."""
        sequence = self.background.popleft()
        if self._left(sequence):
            return
        scheduler = self.schedulers[sequence.model]
        try:
            admitted = not scheduler.isolating and scheduler.admit(sequence)
        except Exception as error:
            self._fail(sequence, error)
            return
        if admitted:
            self._begun = sequence
        else:
            self.background.appendleft(sequence)

    def _left(self, sequence: Sequence) -> bool:
        """Returns whether nobody waits for a request any more, and fails a late one."""
        if sequence.future.cancelled():
            return True
        if late := expired(sequence.request):
            self._fail(sequence, DeadlineExceeded("the deadline passed in the queue"))
        return late

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self.schedulers[sequence.model].fail(sequence.future, error)


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
