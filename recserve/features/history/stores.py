"""Opens history stores: the store of a URL, behind what requests need in front of it.

    a store that waits for a network     GuardedStore -> ExpiringStore -> RedisStore, a plug-in's
    a local one                                          ExpiringStore -> LmdbStore

`ExpiringStore` is there if events expire. `GuardedStore` gives up on a store that hangs or is slow.

The registry maps a URL's scheme to the class that opens it. Other packages register a class in the
entry-point group `recserve.stores`, under its scheme:

    [project.entry-points."recserve.stores"]
    cassandra = "my_package.store:CassandraStore"
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode

import numpy as np

from recserve.bounds import MIN_TIME_US
from recserve.features.history.history import (
    MAX_CAP,
    Applied,
    Change,
    CorruptHistory,
    Expiry,
    HistoryStore,
    ListingUnsupported,
    Stored,
    StoredUsers,
    StoreOptions,
    StoreUnavailable,
    without_expired,
)
from recserve.features.redis_urls import SCHEMES

log = logging.getLogger(__name__)
T = TypeVar("T")
GROUP = "recserve.stores"
TTL = "ttl_s"  # option of every store's URL
_REDIS = "recserve.features.history.redis_store:RedisStore"
BUILT_IN = (
    EntryPoint("lmdb", "recserve.features.history.lmdb_store:LmdbStore", GROUP),
    *(EntryPoint(scheme, _REDIS, GROUP) for scheme in SCHEMES),
)

PAGE = 500  # users that one step of a sweep reads
MAX_SWEEP_S = 3600.0
REST = 4  # a sweep rests this many times as long as it worked
SLOW_S = 0.1  # a failure that took less delays no request
NUM_THREADS = 32  # as many as the server has for requests that read the store
CLOSE_S = 4.0  # time for a store to close; a server has 5 s to close all its parts


def open_store(url: str, options: StoreOptions | None = None) -> HistoryStore:
    """Opens the store of a URL and puts the wrappers that it needs in front of it.

    Args:
        url: `lmdb:PATH`, a URL of `redis_connection`, or one with the scheme of an installed
            package. Each may end with `?ttl_s=SECONDS`, which goes before the
            option of that name.
        options: Options of the store, or None for the defaults.

    Raises:
        ValueError: If no store has the scheme, or an option is out of range.
        StoreUnavailable: If the store cannot be opened.
    """
    options = options or StoreOptions()
    if not 1 <= options.cap <= MAX_CAP:
        raise ValueError(f"cap is {options.cap}; expected 1..{MAX_CAP}")
    url, ttl_s = split_ttl(url)
    if ttl_s is None:
        ttl_s = options.ttl_s
    if ttl_s is not None and not ttl_s > 0:
        raise ValueError(f"ttl_s is {ttl_s}; expected a number of seconds above 0")
    store: HistoryStore = store_class(url).open(url, replace(options, ttl_s=ttl_s))
    if ttl_s is not None:
        store = ExpiringStore(store, ttl_s)
    return GuardedStore(store, options.read_timeout_s) if store.blocks else store


def split_ttl(url: str) -> tuple[str, float | None]:
    """Returns a store's URL without its option `ttl_s`, and the option's value.

    Raises:
        ValueError: If the value is no number.
    """
    place, _, query = url.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    values = [value for name, value in pairs if name == TTL]
    if not values:
        return url, None
    try:
        ttl_s = float(values[-1])
    except ValueError:
        raise ValueError(f"{TTL} is {values[-1]!r}; expected a number of seconds") from None
    left = urlencode([(name, value) for name, value in pairs if name != TTL])
    return f"{place}?{left}" if left else place, ttl_s


def store_class(url: str) -> type[HistoryStore]:
    """Returns the class that opens a URL. Raises ValueError if no store has its scheme."""
    scheme, _, rest = url.partition(":")
    # A package cannot replace a built-in store, so the packages are not searched for one.
    registered = {entry.name: entry for entry in BUILT_IN}
    if scheme not in registered:
        registered |= {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in registered or not rest:
        known = ", ".join(sorted(registered))
        raise ValueError(
            f"store scheme is {scheme[:20]!r}; expected lmdb:PATH, redis://... or unix://... "
            f"(known schemes: {known})"
        )
    try:
        store: type[HistoryStore] = registered[scheme].load()
    except (Exception, SystemExit) as error:
        entry = registered[scheme]
        raise ValueError(
            f"the store of {scheme}: ({entry.value}) cannot be loaded: {error!r}"
        ) from error
    return store


class StoreWrapper(HistoryStore):
    """A store in front of another one; a subclass changes some of its methods.

    Attributes:
        store: The store behind it.
    """

    def __init__(self, store: HistoryStore) -> None:
        self.store, self.ttl_s, self.blocks = store, store.ttl_s, store.blocks

    @classmethod
    def open(cls, url: str, options: StoreOptions) -> HistoryStore:
        """Not supported: `open_store` puts wrappers around an open store."""
        raise NotImplementedError(f"{cls.__name__} has no URL")

    def get_many(self, user_ids: Sequence[str]) -> Sequence[Stored]:
        """As the store's own."""
        return self.store.get_many(user_ids)

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """As the store's own."""
        return self.store.append_many(changes)

    def delete(self, user_id: str) -> bool:
        """As the store's own."""
        return self.store.delete(user_id)

    def server(self, user_id: str) -> str:
        """As the store's own."""
        return self.store.server(user_id)

    def users(self, prefix: str, limit: int, after: str | None) -> StoredUsers:
        """As the store's own."""
        return self.store.users(prefix, limit, after)

    def marks(self, kind: str) -> list[str]:
        """As the store's own."""
        return self.store.marks(kind)

    def add_marks(self, kind: str, first: int, marks: Sequence[str]) -> None:
        """As the store's own."""
        self.store.add_marks(kind, first, marks)

    def close(self) -> None:
        """Releases the store."""
        self.store.close()


class ExpiringStore(StoreWrapper):
    """Returns no event older than `ttl_s` from the store behind it, and deletes such events there.

    A user's expired events are deleted when the user's history changes, and otherwise by a thread
    that goes through all users every `ttl_s / 10` seconds, at least once an hour. Events that have
    a position instead of a timestamp do not expire.

    Attributes:
        ttl_s: Age in seconds at which an event expires.
    """

    def __init__(
        self, store: HistoryStore, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(store)
        self.ttl_s = ttl_s
        self._max_age_s, self._clock, self._stop = ttl_s, clock, threading.Event()
        self._thread = threading.Thread(target=self._keep_sweeping, daemon=True, name="expiry")
        self._thread.start()

    def get_many(self, user_ids: Sequence[str]) -> Sequence[Stored]:
        """As the store's own, without expired events."""
        before_us = self._before_us()
        return [
            without_expired(found, before_us) if isinstance(found, np.ndarray) else found
            for found in self.store.get_many(user_ids)
        ]

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """As the store's own. It also deletes the expired events of these users."""
        before_us = self._before_us()
        applied = self.store.append_many(
            {user_id: [Expiry(before_us), *made] for user_id, made in changes.items()}
        )
        return {user_id: _without_first(each) for user_id, each in applied.items()}

    def sweep(self) -> int:
        """Deletes the expired events of all users.

        Returns:
            Number of users who had any.

        Raises:
            ListingUnsupported: If the store cannot list its users.
            StoreUnavailable: If the store does not answer.
        """
        num_users, after = 0, None
        while not self._stop.is_set():
            began_s = time.monotonic()
            page = self.store.users("", PAGE, after)
            num_users += self._sweep(list(dict.fromkeys(page.ids)))
            if (after := page.next) is None:
                break
            self._stop.wait(REST * (time.monotonic() - began_s))
        return num_users

    def close(self) -> None:
        """Ends the thread, then closes the store.

        If a call of the thread takes longer than CLOSE_S, the store is left as it is.
        """
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the history store is not closed: a sweep of expired events does not end")
        else:
            self.store.close()

    def _sweep(self, user_ids: list[str]) -> int:
        """Deletes the expired events of some users, and returns how many of them had any."""
        before_us = self._before_us()
        found = zip(user_ids, self.store.get_many(user_ids), strict=True)
        late = [
            user_id
            for user_id, history in found
            if isinstance(history, np.ndarray)
            and without_expired(history, before_us).size < history.size
        ]
        if late:
            self.store.append_many({user_id: [Expiry(before_us)] for user_id in late})
        return len(late)

    def _keep_sweeping(self) -> None:
        while True:
            try:
                if num_users := self.sweep():
                    log.info("deleted expired events of %d users", num_users)
            except ListingUnsupported:
                log.warning("this store cannot list users; events expire when a user gets new ones")
                return
            except StoreUnavailable as error:
                log.warning("expired events are not deleted now: %s", error)
            except BaseException:  # of a plug-in's store; a later sweep may succeed
                log.exception("expired events are not deleted now")
            if self._stop.wait(min(self._max_age_s / 10, MAX_SWEEP_S)):
                return

    def _before_us(self) -> int:
        return max(MIN_TIME_US, int((self._clock() - self._max_age_s) * 1e6))


def _without_first(applied: Applied | CorruptHistory) -> Applied | CorruptHistory:
    """Returns the result without that of the expiry, which came first."""
    if isinstance(applied, CorruptHistory):
        return applied
    return Applied(applied.taken[1:], applied.revised)


class GuardedStore(StoreWrapper):
    """Refuses calls at once while the store behind it hangs, and reads while it is slow.

    Two circuits count by their own rules, so that a slow store still takes changes:

    - `calls` opens after five calls in a row that failed slowly. Quick failures, such as a refused
      connection, do not count.
    - `reads` opens when five of the last ten reads of requests failed or were over time.

    While a circuit is open, one call per second tries the store. Each server of the store has its
    own two, so that one that fails does not refuse the users of the others.

    Attributes:
        read_timeout_s: Time limit of `read`; None waits for the store.
        calls: Circuit of the calls for one user, by server. None has those for several users.
        reads: Circuit of `read`, by server.
    """

    def __init__(
        self,
        store: HistoryStore,
        read_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store)
        self.read_timeout_s, self._clock = read_timeout_s, clock
        self.calls = defaultdict[str | None, Circuit](
            lambda: Circuit("hangs", most_failures=5, window=5, clock=clock)
        )
        self.reads = defaultdict[str, Circuit](
            lambda: Circuit("is too slow or fails", most_failures=5, window=10, clock=clock)
        )
        self._threads = DaemonThreads(NUM_THREADS, "history")

    def read(self, user_id: str) -> np.ndarray:
        """As `get`, within `read_timeout_s`.

        A read that takes longer continues on a thread, and its result is dropped. A change of a
        history is not limited: it waits until the store says what is stored.
        """
        if self.read_timeout_s is None:
            return self.get(user_id)
        circuit = self.reads[self.store.server(user_id)]
        circuit.enter()
        read = self._threads.submit(partial(self.get, user_id))
        wait((read,), self.read_timeout_s)
        if not read.done():
            read.cancel()
            circuit.count_failure()
            raise StoreUnavailable(f"no answer within {1e3 * self.read_timeout_s:g} ms")
        try:
            history = read.result()
        except StoreUnavailable:
            circuit.count_failure()
            raise
        except CorruptHistory:
            circuit.count_success()
            raise
        circuit.count_success()
        return history

    def get_many(self, user_ids: Sequence[str]) -> Sequence[Stored]:
        """As the store's own."""
        return self._call(user_ids, lambda: self.store.get_many(user_ids))

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """As the store's own."""
        return self._call(list(changes), lambda: self.store.append_many(changes))

    def delete(self, user_id: str) -> bool:
        """As the store's own."""
        return self._call([user_id], lambda: self.store.delete(user_id))

    def users(self, prefix: str, limit: int, after: str | None) -> StoredUsers:
        """As the store's own."""
        return self._call([], lambda: self.store.users(prefix, limit, after))

    def marks(self, kind: str) -> list[str]:
        """As the store's own."""
        return self._call([], lambda: self.store.marks(kind))

    def add_marks(self, kind: str, first: int, marks: Sequence[str]) -> None:
        """As the store's own."""
        self._call([], lambda: self.store.add_marks(kind, first, marks))

    def close(self) -> None:
        """Takes no more reads and releases the store, within CLOSE_S.

        A store that takes longer is left as it is. Its threads do not keep the process from ending.
        """
        self._threads.close()
        thread = DaemonThreads(1, "close-history")
        closed = thread.submit(self.store.close)
        wait((closed,), CLOSE_S)
        thread.close()
        if closed.done():
            closed.result()
        else:
            log.error("the history store did not close within %g s", CLOSE_S)

    def _call(self, user_ids: Sequence[str], function: Callable[[], T]) -> T:
        """Calls the store. Raises StoreUnavailable if it fails, or at once while it hangs."""
        circuit = self.calls[self.store.server(user_ids[0]) if len(user_ids) == 1 else None]
        circuit.enter()
        began_s = self._clock()
        try:
            answer = function()
        except StoreUnavailable:
            if self._clock() - began_s >= SLOW_S:
                circuit.count_failure()
            raise
        circuit.count_success()
        return answer


class DaemonThreads:
    """A pool of threads that Python does not wait for when the process ends.

    It waits for those of a `ThreadPoolExecutor`, so one call that hangs would keep the process.

    Args:
        num_threads: Most threads. They start when they are needed.
        name: Beginning of their names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._lock = threading.Lock()  # of the next two
        self._num_started = 0
        self._num_idle = 0  # exact until all threads have started
        self._calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function on a thread, as soon as one is free."""
        future = Future[T]()
        self._calls.put((future, function))
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            elif self._num_started < self._num_threads:
                self._num_started += 1
                name = f"{self._name}_{self._num_started}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """Cancels calls that wait for a thread. Threads end with the calls that they have."""
        with suppress(Empty):
            while (call := self._calls.get_nowait()) is not None:
                call[0].cancel()
        for _ in range(self._num_started):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, function  # what they refer to lives no longer than the call
            with self._lock:
                self._num_idle += 1


class Circuit:
    """Refuses calls to a history store while it is open, and is closed at first.

    It opens after several failures. Its owner says what a failure is. While it is open, one call
    per `probe_s` seconds tries the store. The first success closes it.

    Args:
        trouble: What the store does while the circuit is open, such as `hangs`.
        most_failures: Failures among the last `window` calls that open it.
        window: Number of calls that count. If it equals `most_failures`, failures in a row open it.
        probe_s: Seconds between two tries while it is open.
        clock: Returns seconds.
    """

    def __init__(
        self,
        trouble: str,
        most_failures: int = 5,
        window: int = 5,
        probe_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trouble, self.most_failures = trouble, most_failures
        self.probe_s, self._clock = probe_s, clock
        self._lock = threading.Lock()
        self._last: deque[bool] = deque(maxlen=window)  # whether each of the last calls failed
        self._next_probe_s: float | None = None  # None while it is closed

    @property
    def is_open(self) -> bool:
        """Whether it refuses calls."""
        return self._next_probe_s is not None

    def enter(self) -> None:
        """Begins a call. Raises StoreUnavailable if it is refused."""
        with self._lock:
            if self._next_probe_s is None:
                return
            if self._clock() < self._next_probe_s:
                raise StoreUnavailable(
                    f"the history store {self.trouble}; it is tried again every second"
                )
            self._next_probe_s = self._clock() + self.probe_s

    def count_failure(self) -> None:
        """Counts a failure."""
        with self._lock:
            if self._next_probe_s is not None:
                return
            self._last.append(True)
            if sum(self._last) >= self.most_failures:
                log.error("the history store %s; requests go on without histories", self.trouble)
                self._next_probe_s = self._clock() + self.probe_s

    def count_success(self) -> None:
        """Counts a success."""
        with self._lock:
            if self._next_probe_s is not None:
                log.info("the history store answers again")
                self._last.clear()
            self._last.append(False)
            self._next_probe_s = None
