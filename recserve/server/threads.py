"""Threads for work that must not hold the event loop, in a pool for each kind of work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from recserve.core.client import Client
from recserve.core.errors import DeadlineExceeded, QueueFull
from recserve.core.plugins import request_error
from recserve.engine.request_queue import Places
from recserve.schemas.items import RankBatchRequest, RankRequest, RecommendRequest
from recserve.server.errors import NotReady
from recserve.service.similar import SIMILARITIES

A = TypeVar("A")
# From these sizes on, a request is prepared and answered on a thread: it takes milliseconds.
LARGE_BATCH = 8
LARGE_IDS = 512
LARGE_K = 256
LARGE_VALUES = 2048  # items times fields
LARGE_BYTES = 64 << 10  # of a body that is not decoded by one call of a C function
CLOSING = "the server is closing"
LATE = "the deadline passed before the request was prepared"


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that waits for a thread."""

    future: Future[Any]
    function: Callable[[], Any]
    size: int


class FairThreads:
    """A pool of threads that is shared evenly between clients.

    A thread that becomes free takes the oldest call of the client with the fewest running calls,
    and of several such clients that of the one served longest ago. A client may use a share of the
    threads that other clients leave, and a share of the places in the line of waiting calls. A call
    of a client that has none therefore starts at once, or after one call of each other client.

    Calls of one client may have sizes. Then its oldest and its smallest call take turns, so that a
    small call overtakes large ones, and a large one waits for at most one other per older call.

    Attributes:
        num_threads: Number of threads.
        share: Share of one client, as in `queue_share`. 1 sets no bound.
        line: Places of the calls that wait.
    """

    def __init__(
        self, num_threads: int, name: str, capacity: int = 1024, share: float = 0.5
    ) -> None:
        self.num_threads, self.share = num_threads, share
        self.line = Places(capacity, share, "a thread that prepares them")
        self._name = name
        self._changed = threading.Condition()
        self._num_started = self._num_idle = 0  # threads
        self._closed = False
        # The client that was served longest ago comes first.
        self._waiting: dict[bytes, deque[_Call]] = {}
        self._overtaken: set[bytes] = set()  # clients whose last call was not their oldest
        self._running: dict[bytes, int] = {}

    def submit(self, function: Callable[[], A], client: Client, size: int = 0) -> Future[A]:
        """Calls a function on a thread, when it is the client's turn.

        Args:
            function: Called without arguments.
            client: Who waits for it.
            size: How large the call is, in any unit, compared with others of the pool.

        Raises:
            QueueFull: If the line is full, or the client has its share of it.
            RuntimeError: If the pool takes no more calls.
        """
        key, future = client.key, Future[A]()
        with self._changed:
            if self._closed:
                raise RuntimeError(CLOSING)
            self.line.check(key, 1)
            self.line.take(key)
            self._waiting.setdefault(key, deque()).append(_Call(future, function, size))
            self._wake()
        return future

    def shutdown(self) -> None:
        """Takes no more calls and cancels those that wait. Threads end with the calls they have."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            waiting = [call.future for calls in self._waiting.values() for call in calls]
            self._waiting.clear()
        for future in waiting:
            future.cancel()

    def _wake(self) -> None:
        """Lets an idle or a new thread look for a call, if one may start.

        A thread that takes a call does the same, so that no call waits while one may start.
        """
        if self._choose() is None:
            return
        if self._num_idle:
            self._changed.notify()
        elif self._num_started < self.num_threads:
            self._num_started += 1
            name = f"{self._name}_{self._num_started}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        """Runs calls until the pool is closed."""
        client: bytes | None = None
        while True:
            with self._changed:
                if client is not None:
                    self._leave(client)
                while (client := self._choose()) is None:
                    if self._closed:
                        return
                    self._num_idle += 1
                    self._changed.wait()
                    self._num_idle -= 1
                call = self._take(client)
                self._wake()
            if call.future.set_running_or_notify_cancel():
                try:
                    call.future.set_result(call.function())
                except BaseException as error:
                    call.future.set_exception(request_error(error))
            del call

    def _choose(self) -> bytes | None:
        """Returns the client whose oldest call starts next; None if no call may start."""
        free = self.num_threads - sum(self._running.values())
        if not free:
            return None
        best: bytes | None = None
        fewest = self.num_threads
        for client in self._waiting:
            own = self._running.get(client, 0)
            most = max(1, int((free + own) * self.share)) if client else self.num_threads
            if own < min(fewest, most):
                best, fewest = client, own
        return best

    def _take(self, client: bytes) -> _Call:
        """Removes a call of a client, which is then the last one to be served again."""
        calls = self._waiting.pop(client)
        found = calls[0]
        if client in self._overtaken:
            self._overtaken.discard(client)
        elif found.size:
            found = min(calls, key=lambda call: call.size)
            if found is not calls[0]:
                self._overtaken.add(client)
        calls.remove(found)
        if calls:
            self._waiting[client] = calls
        else:
            self._overtaken.discard(client)
        self.line.leave(client)
        self._running[client] = self._running.get(client, 0) + 1
        return found

    def _leave(self, client: bytes) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]


class Threads:
    """Pools of threads. A store that hangs, or a slow chat template, cannot exhaust the others.

    Attributes:
        store: Requests for items that wait for a stored history.
        changes: Calls that read or change events and items, and wait for the store or the disk.
        items: Large requests for items.
        text: Chat templates and tokenisation.
        grammars: Constraints that no request has had before, with the sizes of their grammars.
            Requests without one never wait for them.
        reports: Metrics, and other handlers that are no coroutines.
    """

    def __init__(self, capacity: int = 1024, share: float = 0.5) -> None:
        """Makes the pools.

        Args:
            capacity: Calls that may wait for each pool (`max_queue`).
            share: Share of one client in threads and waiting calls (`queue_share`).
        """
        self.store = FairThreads(32, "store", capacity, share)
        self.changes = FairThreads(32, "changes", capacity, share)
        self.items = FairThreads(4, "items", capacity, share)
        self.text = FairThreads(8, "text", capacity, share)
        self.grammars = FairThreads(1, "grammars", capacity, share)
        self.reports = FairThreads(4, "reports", capacity, share)

    def close(self) -> None:
        """Takes no more work. Threads end with the work that they have."""
        pools = (self.store, self.changes, self.items, self.text, self.grammars, self.reports)
        for pool in pools:
            pool.shutdown()


async def on_thread(
    pool: FairThreads,
    function: Callable[[], A],
    client: Client,
    deadline_s: float | None = None,
    size: int = 0,
) -> A:
    """Returns what a function returns on a thread of the pool.

    Args:
        pool: The threads.
        function: Called on one of them.
        client: Who waits for it.
        deadline_s: time.monotonic() value at which a call that still waits is dropped; None waits.
        size: As in `FairThreads.submit`.

    Raises:
        QueueFull: If the client has its share of the waiting calls, or too many wait.
        DeadlineExceeded: If the deadline passes before the call begins.
        NotReady: If the pool takes no more work.
    """
    try:
        call = pool.submit(function, client, size)
    except (QueueFull, NotReady):
        raise
    except RuntimeError as error:
        raise NotReady(CLOSING) from error
    late = False

    def drop() -> None:
        nonlocal late
        late = call.cancel()

    timer = None
    if deadline_s is not None:
        left_s = max(0.0, deadline_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s, drop)
    try:
        return await asyncio.wrap_future(call)
    except asyncio.CancelledError:
        if late:
            raise DeadlineExceeded(LATE) from None
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise NotReady(CLOSING) from None  # the pool dropped what had not begun
    finally:
        if timer is not None:
            timer.cancel()


def is_large(body: object) -> bool:
    """Returns whether a request takes milliseconds to prepare or to answer.

    Args:
        body: A request for items, a batch of them, or a list of those that one body has made.
    """
    requests = _requests(body)
    ids = values = 0
    for one in requests:
        ids += len(one.history or ())
        if isinstance(one, RankRequest):
            ids += len(one.candidates)
            values += len(one.candidates) * len(one.fields)
            continue
        # Quotas read filters, and the first cap on a column reads all items.
        rules = one.diversity is not None and (one.diversity.quotas or one.diversity.caps)
        compared = one.strategy in SIMILARITIES  # with all items
        if one.filter is not None or rules or compared or one.k > LARGE_K:
            return True
        ids += len(one.exclude.item_ids)
        values += one.k * len(one.fields)
    return len(requests) > LARGE_BATCH or ids > LARGE_IDS or values > LARGE_VALUES


def reads_store(body: object) -> bool:
    """Returns whether a request needs what is stored of a user: the history, or what was shown."""
    return any(
        [
            one.user is not None
            and (
                one.history is None
                or (
                    isinstance(one, RecommendRequest)
                    and (one.exclude_shown is not None or one.discount_shown is not None)
                )
            )
            for one in _requests(body)
        ]
    )


def _requests(body: object) -> Sequence[RecommendRequest | RankRequest]:
    match body:
        case RecommendRequest() | RankRequest():
            return (body,)
        case RankBatchRequest():
            return body.requests
        case list():
            return body
    return ()
