"""Precomputes the prefixes of users with new events, and drops outdated ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future

from recserve.core.client import Client
from recserve.core.errors import QueueFull
from recserve.core.request import PrefixKeys, PrewarmQuery, Request, Result
from recserve.engine.engine import Engine
from recserve.engine.scheduler import RequestTooLarge
from recserve.service.history import EMPTY_HISTORY, History, Revision
from recserve.service.prefixes import RankerPrefixBuilder, RecommenderPrefixBuilder
from recserve.service.snapshot import Snapshot

PREWARM_TIMEOUT_S = 10.0  # a prefill that has not started by then is dropped


class Prewarm:
    """Submits prefills of user histories to the engine, without waiting for them."""

    def __init__(
        self,
        engine: Engine,
        recommender: RecommenderPrefixBuilder | None,
        ranker: RankerPrefixBuilder | None,
    ) -> None:
        """Connects the engine with the prefix builders of the models.

        Args:
            engine: Engine of the models.
            recommender: Prefix builder of the recommender; None without one.
            ranker: Prefix builder of the ranker; None without one.
        """
        self.engine = engine
        self.recommender = recommender
        self.ranker = ranker
        self._under_way: dict[str, list[Future[Result]]] = {}
        self._lock = threading.Lock()

    def warm(
        self, histories: Iterable[tuple[str, History]], snapshot: Snapshot, client: Client
    ) -> int:
        """Submits prefills for users and cancels their unfinished earlier prefills.

        Args:
            histories: User ids with their histories. They are taken one by one, so that none is
                read in vain.
            snapshot: The catalogue version.
            client: Who sends the events. Its later requests find the prefixes.

        Returns:
            Number of submitted prefills; a full queue ends the submission early.
        """
        begun = 0
        for user_id, history in histories:
            self._drop(user_id)
            try:
                for request in self._requests(user_id, history, snapshot):
                    self._submit(user_id, request, client)
                    begun += 1
            except (QueueFull, RequestTooLarge):
                break
        return begun

    def forget(self, revisions: Mapping[str, Revision], snapshot: Snapshot) -> None:
        """Drops the cached prefixes of former histories and cancels the users' prefills.

        The common beginning of former and current history stays in the cache.

        Args:
            revisions: Former and current history by user id.
            snapshot: The catalogue version.
        """
        for user_id in revisions:
            self._drop(user_id)
        stale = [
            keys
            for user_id, revision in revisions.items()
            for keys in self._stale_keys(user_id, revision, snapshot)
        ]
        self.engine.forget(*stale)

    def _stale_keys(
        self, user_id: str, revision: Revision, snapshot: Snapshot
    ) -> Iterator[PrefixKeys]:
        before = revision.before
        left = EMPTY_HISTORY if revision.after is None else revision.after
        if self.recommender is not None:
            yield from self.recommender.stale_keys(snapshot, before.rows, left.rows, user_id)
        if self.ranker is not None:
            yield from self.ranker.stale_keys(snapshot, before, left)
            self.ranker.forget(None if revision.after is None else before)

    def _requests(self, user_id: str, history: History, snapshot: Snapshot) -> list[Request]:
        if not history.rows.size:
            return []
        until_s = time.monotonic() + PREWARM_TIMEOUT_S
        requests: list[Request] = []
        if self.ranker is not None:
            prefix = self.ranker.build_user(snapshot, history)
            requests.append(PrewarmQuery(prefix, "ranker", until_s))
        if self.recommender is not None:
            prefix = self.recommender.build(snapshot, history.rows, user_id)
            requests.append(PrewarmQuery(prefix, "recommender", until_s))
        return requests

    def _submit(self, user_id: str, request: Request, client: Client) -> None:
        future = self.engine.submit(request, client)
        with self._lock:
            self._under_way.setdefault(user_id, []).append(future)
        future.add_done_callback(lambda done: self._forget(user_id, done))

    def _forget(self, user_id: str, future: Future[Result]) -> None:
        with self._lock:
            left = self._under_way.get(user_id, [])
            if future in left:
                left.remove(future)
                if not left:
                    del self._under_way[user_id]

    def _drop(self, user_id: str) -> None:
        with self._lock:
            futures = self._under_way.pop(user_id, [])
        for future in futures:
            future.cancel()
