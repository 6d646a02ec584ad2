"""Keeps events for a limited time, in whichever store they are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from recserve.bounds import MIN_TIME_US
from recserve.features.history.history import (
    Applied,
    Change,
    CorruptHistory,
    Expiry,
    HistoryStore,
    ListingUnsupported,
    StoredUsers,
    StoreOptions,
    StoreUnavailable,
)
from recserve.features.history.history_merge import without_expired

log = logging.getLogger(__name__)

PAGE = 500  # users that one step of a sweep reads
MAX_SWEEP_S = 3600.0
REST = 4  # a sweep rests this many times as long as it worked


class ExpiringStore(HistoryStore):
    """A history store that returns no event older than `ttl_s` and deletes such events.

    A user's expired events are deleted when the user's history changes, and otherwise by a thread
    that goes through all users every `ttl_s / 10` seconds, at least once an hour. Events that have
    a position instead of a timestamp do not expire.

    Attributes:
        store: The store behind it.
        ttl_s: Age in seconds at which an event expires.
        blocks: As the store's own.
    """

    def __init__(
        self, store: HistoryStore, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.store, self.ttl_s, self.blocks = store, ttl_s, store.blocks
        self._max_age_s, self._clock, self._stop = ttl_s, clock, threading.Event()
        self._thread = threading.Thread(target=self._keep_sweeping, daemon=True, name="expiry")
        self._thread.start()

    @classmethod
    def open(cls, url: str, options: StoreOptions) -> HistoryStore:
        """Not supported: `open_store` puts this class around an open store."""
        raise NotImplementedError("an expiring store has no URL")

    def get_many(self, user_ids: Sequence[str]) -> list[np.ndarray | CorruptHistory]:
        """As the store's own, without expired events."""
        before_us = self._before_us()
        return [
            found if isinstance(found, CorruptHistory) else without_expired(found, before_us)
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

    def delete(self, user_id: str) -> bool:
        """As the store's own."""
        return self.store.delete(user_id)

    def users(self, prefix: str, limit: int, after: str | None) -> StoredUsers:
        """As the store's own. It may list users whose events have expired since the last sweep."""
        return self.store.users(prefix, limit, after)

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
            num_users += self._swept(list(dict.fromkeys(page.ids)))
            if (after := page.next) is None:
                break
            self._stop.wait(REST * (time.monotonic() - began_s))
        return num_users

    def close(self) -> None:
        """Ends the thread, then closes the store."""
        self._stop.set()
        self._thread.join()
        self.store.close()

    def _swept(self, user_ids: list[str]) -> int:
        """Deletes the expired events of some users, and returns how many of them had any."""
        before_us = self._before_us()
        found = zip(user_ids, self.store.get_many(user_ids), strict=True)
        late = [
            user_id
            for user_id, history in found
            if not isinstance(history, CorruptHistory)
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
            if self._stop.wait(min(self._max_age_s / 10, MAX_SWEEP_S)):
                return

    def _before_us(self) -> int:
        return max(MIN_TIME_US, int((self._clock() - self._max_age_s) * 1e6))


def _without_first(applied: Applied | CorruptHistory) -> Applied | CorruptHistory:
    """Returns the result without that of the expiry, which came first."""
    if isinstance(applied, CorruptHistory):
        return applied
    return Applied(applied.taken[1:], applied.revised)
