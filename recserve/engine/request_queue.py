"""The queue of requests that wait for admission, and their cancellation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, TypeVar

from recserve.core.client import Client
from recserve.core.errors import DeadlineExceeded, QueueFull, TooManyQueries
from recserve.core.plugins import request_error
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
from recserve.engine.kv_cache import KVCache
from recserve.engine.scheduler import GROUP_DELAY_S, Scheduler, has_expired, service_order
from recserve.speculation.completion import TextQuery

ResultT = TypeVar("ResultT")
MAX_RETRY_AFTER_S = 60.0


class RequestQueue:
    """A bounded queue for each model, ordered by priority and then by age.

    Schedulers that share a KV cache serve one model, and their requests wait in one line.
    Background requests come last. As many of them may wait as of the requests of one model.

    Attributes:
        capacity: Most waiting requests of each model, and most background requests.
        share: Share of the places that other clients leave which one client may take.
        waiting: Requests that wait, without background ones.
        background: Background requests that wait, oldest first.
    """

    def __init__(
        self, capacity: int, share: float, schedulers: Mapping[str, Scheduler[Any, Any]]
    ) -> None:
        """Makes an empty queue for the requests of these schedulers, by model."""
        self.capacity, self.share, self.schedulers = capacity, share, schedulers
        self.waiting: dict[Sequence, None] = {}
        self.background: deque[Sequence] = deque()
        self._lock = threading.Lock()  # of `waiting` and of the places
        self._places: dict[KVCache, Places] = {}
        self._begun: Sequence | None = None

    def __len__(self) -> int:
        """Returns the number of waiting requests, without background ones."""
        return len(self.waiting)

    @property
    def num_background_begun(self) -> int:
        """Number of background requests that run, at most one."""
        return int(self._begun is not None and not self._begun.future.done())

    def check(self, models: Iterable[str], client: Client, num_ahead: int = 0) -> None:
        """Raises QueueFull if no queue of these models has room for a request of the client.

        Args:
            models: Models of which the request needs one. Those without a scheduler do not count.
            client: Who sends the request.
            num_ahead: Requests that are on their way to the queue before it.
        """
        full: QueueFull | None = None
        for model in models:
            if model in self.schedulers:
                try:
                    return self._places_of(model).check(client.key, 1, num_ahead)
                except QueueFull as error:
                    full = error
        if full is not None:
            raise full

    def enqueue(self, sequences: Seq[Sequence]) -> None:
        """Adds the requests of one client, all or none.

        Raises:
            QueueFull: If the queue of a model lacks room for its requests.
            TooManyQueries: If it would lack room even with nothing else in it.
        """
        with self._lock:
            needed: dict[Places, int] = {}
            num_background = 0
            for sequence in sequences:
                if sequence.background:
                    num_background += 1
                else:
                    places = self._places_of(sequence.model)
                    needed[places] = needed.get(places, 0) + 1
            if num_background and len(self.background) + num_background > self.capacity:
                raise QueueFull(f"{self.capacity} background requests wait already", GROUP_DELAY_S)
            for places, count in needed.items():
                places.check(sequences[0].client.key, count)
            for sequence in sequences:
                if sequence.background:
                    self.background.append(sequence)
                else:
                    self._add(sequence)

    def drain(self, error: Exception) -> None:
        """Fails all requests."""
        for sequence in list(self.waiting):
            self._remove(sequence)
            self._fail(sequence, error)
        while self.background:
            self._fail(self.background.popleft(), error)

    def admit(self, max_running: int) -> None:
        """Moves requests to their schedulers, by priority and then by age.

        - A request that finds no pages blocks the later requests of all schedulers that share its
          KV cache. Small requests therefore cannot starve a large one.
        - A request that finds no place in its scheduler blocks the later requests of that
          scheduler.
        - A running text that is served later gives its place to a waiting text, at most one to
          each, and waits here again. Running texts that are served later give their pages, as many
          as a waiting request needs.

        Args:
            max_running: Most requests that a scheduler runs at once.
        """
        full: set[Scheduler[Any, Any] | KVCache] = set()
        with self._lock:
            sequences = sorted(self.waiting, key=service_order)
        for sequence in sequences:
            if not self._left(sequence):
                scheduler = self.schedulers[sequence.model]
                if full and (scheduler in full or scheduler.kv in full):
                    continue
                try:
                    lacking = self._admit(sequence, scheduler, max_running)
                except BaseException as raised:
                    error = request_error(raised)
                    self._fail(sequence, error)
                else:
                    if lacking is not None:
                        full.add(lacking)
                        continue
            self._remove(sequence)

    def _admit(
        self, sequence: Sequence, scheduler: Scheduler[Any, Any], max_running: int
    ) -> Scheduler[Any, Any] | KVCache | None:
        """Moves a request to its scheduler. Returns None, or what lacks room for it: the scheduler,
        or the KV cache.
        """
        if scheduler.isolating:
            return scheduler
        kv = scheduler.kv
        for one in self.schedulers.values():
            if one.kv is kv and one.lacks_pages_before(sequence):
                return kv
        if scheduler.num_running >= max_running:
            last = scheduler.give_way(sequence)
            if last is None:
                return scheduler
            with self._lock:
                self._add(last)
        if scheduler.admit(sequence):
            return None
        count = scheduler.pages_to_admit(sequence)
        if not count:
            return scheduler
        sharers = [one for one in self.schedulers.values() if one.kv is kv]
        freed = any([one.free_pages(count, sequence) for one in sharers])
        return None if freed and scheduler.admit(sequence) else kv

    def admit_background(self) -> None:
        """Moves the oldest background request to its scheduler, if its pages are free."""
        sequence = self.background.popleft()
        if self._left(sequence):
            return
        scheduler = self.schedulers[sequence.model]
        try:
            admitted = not scheduler.isolating and scheduler.admit(sequence)
        except BaseException as raised:
            error = request_error(raised)
            self._fail(sequence, error)
            return
        if admitted:
            self._begun = sequence
        else:
            self.background.appendleft(sequence)

    def _places_of(self, model: str) -> Places:
        kv = self.schedulers[model].kv
        places = self._places.get(kv)
        if places is None:
            places = self._places.setdefault(kv, Places(self.capacity, self.share))
        return places

    def _add(self, sequence: Sequence) -> None:
        """Adds a request. The caller holds the lock."""
        self.waiting[sequence] = None
        self._places_of(sequence.model).take(sequence.client.key)

    def _remove(self, sequence: Sequence) -> None:
        """Removes a request, whose place is free from now on."""
        with self._lock:
            del self.waiting[sequence]
            self._places_of(sequence.model).leave(sequence.client.key)

    def _left(self, sequence: Sequence) -> bool:
        """Returns whether nobody waits for a request any more, and fails a late one."""
        if sequence.future.cancelled():
            return True
        if late := has_expired(sequence.request):
            self._fail(sequence, DeadlineExceeded("the deadline passed in the queue"))
        return late

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self.schedulers[sequence.model].fail(sequence.future, error)


class Places:
    """The places of one model's queue.

    A client may take a share of the places that other clients leave. With a share of one half, a
    client that is alone fills half of the queue, and of two clients each fills a third. A place is
    therefore always left for a client that has none.

    Attributes:
        capacity: Number of places.
        share: The share of one client. 1 sets no bound.
        what: What the requests wait for, for messages.
        num_taken: Number of places that waiting requests have.
        taken_by: The same for each client that has any.
        departures: How fast places become free.
    """

    def __init__(self, capacity: int, share: float, what: str = "this model") -> None:
        self.capacity, self.share, self.what = capacity, share, what
        self.num_taken = 0
        self.taken_by: dict[bytes, int] = {}
        self.departures = Departures()

    def check(self, client: bytes, count: int, num_ahead: int = 0) -> None:
        """Raises an error if there is no room for so many requests of a client.

        Args:
            client: Its `Client.key`. The share does not bind callers in this process.
            count: Number of requests.
            num_ahead: Requests that are on their way to the queue before them.

        Raises:
            QueueFull: If other requests have the places.
            TooManyQueries: If the requests would find no room in an empty queue.
        """
        own = self.taken_by.get(client, 0)
        left = self.capacity - self.num_taken - num_ahead
        most = self._most(client, left + own)
        if not count or (count <= left and own + count <= most):
            return
        if count > (limit := self._most(client, self.capacity)):
            raise TooManyQueries(
                f"this request needs {count} places in the queue of the model; one request gets at "
                f"most {limit} (max_queue {self.capacity}, queue_share {self.share:g}); split it"
            )
        if count > left:
            message = f"{self.num_taken + num_ahead} requests wait for {self.what}"
            if count > 1:
                message += f", and this one needs {count} places"
            raise self._full(f"{message}; the queue has {self.capacity} places (max_queue)")
        raise self._full(
            f"{own} requests of this client wait for {self.what}; it may have {most} of "
            f"{self.capacity} places (queue_share {self.share:g} of those that others leave)"
        )

    def take(self, client: bytes) -> None:
        """Gives a request of a client a place."""
        self.num_taken += 1
        self.taken_by[client] = self.taken_by.get(client, 0) + 1

    def leave(self, client: bytes) -> None:
        """Takes back the place of a request."""
        self.num_taken -= 1
        self.taken_by[client] -= 1
        if not self.taken_by[client]:
            del self.taken_by[client]
        self.departures.add(1, time.monotonic())

    def _most(self, client: bytes, places: int) -> int:
        """Returns how many of these places a client may have."""
        return max(1, int(places * self.share)) if client else places

    def _full(self, message: str) -> QueueFull:
        seconds = self.departures.seconds_for(self.num_taken, time.monotonic())
        return QueueFull(message, seconds)


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

    def track(self, future: Future[ResultT]) -> Future[ResultT]:
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
