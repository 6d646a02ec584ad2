"""Precomputes the prefixes of users with new events, and drops outdated ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future

from recserve.core.errors import QueueFull
from recserve.core.request import PrefixKeys, PrewarmQuery, Request, Result
from recserve.engine.engine import Engine
from recserve.engine.runtime.scheduler import RequestTooLarge
from recserve.schemas.items import UserRef
from recserve.service.history.histories import Histories, Rewritten
from recserve.service.live_catalog import LiveCatalog
from recserve.service.prefixes import RankerPrefixBuilder, RecommenderPrefixBuilder
from recserve.service.snapshot import EMPTY_HISTORY

PREWARM_TIMEOUT_S = 10.0  # a prefill that has not started by then is dropped


class Prewarm:
    """Submits prefills of user histories to the engine, without waiting for them."""

    def __init__(
        self,
        engine: Engine,
        catalog: LiveCatalog,
        histories: Histories,
        recommender: RecommenderPrefixBuilder | None,
        ranker: RankerPrefixBuilder | None,
    ) -> None:
        """Connects the engine with the prefix builders of the models.

        Args:
            engine: Runs the prefills.
            catalog: The live catalogue.
            histories: Stored events of users.
            recommender: Prefix builder of the recommender; None without one.
            ranker: Prefix builder of the ranker; None without one.
        """
        self._engine, self._catalog, self._histories = engine, catalog, histories
        self.recommender = recommender
        self.ranker = ranker
        self._under_way: dict[str, list[Future[Result]]] = {}
        self._lock = threading.Lock()

    def warm(self, user_ids: Iterable[str]) -> int:
        """Submits prefills for users and cancels their unfinished earlier prefills.

        Returns:
            Number of submitted prefills; a full queue ends the submission early.
        """
        begun = 0
        for user_id in user_ids:
            self._drop(user_id)
            try:
                for request in self._requests(user_id):
                    self._submit(user_id, request)
                    begun += 1
            except (QueueFull, RequestTooLarge):
                break
        return begun

    def forget(self, rewritten: Mapping[str, Rewritten]) -> None:
        """Drops the cached prefixes of former histories and cancels the users' prefills.

        The common beginning of former and current history stays in the cache.

        Args:
            rewritten: Former and current history by user id.
        """
        keys = [key for user, each in rewritten.items() for key in self._gone(user, each)]
        self._engine.forget(*keys)

    def _gone(self, user_id: str, rewritten: Rewritten) -> Iterator[PrefixKeys]:
        self._drop(user_id)
        before, snapshot = rewritten.before, self._catalog.current
        left = EMPTY_HISTORY if rewritten.after is None else rewritten.after
        if self.recommender is not None:
            yield from self.recommender.stale_keys(snapshot, before.rows, left.rows)
        if self.ranker is not None:
            yield from self.ranker.stale_keys(snapshot, before, left)
            self.ranker.forget(None if rewritten.after is None else before)

    def _requests(self, user_id: str) -> list[Request]:
        snapshot = self._catalog.current
        history = self._histories.read(UserRef(id=user_id), None, snapshot)
        if not history.rows.size:
            return []
        until_s = time.monotonic() + PREWARM_TIMEOUT_S
        requests: list[Request] = []
        if self.ranker is not None:
            prefix = self.ranker.build_user(snapshot, history)
            requests.append(PrewarmQuery(prefix, "ranker", until_s))
        if self.recommender is not None:
            prefix = self.recommender.build(snapshot, history.rows)
            requests.append(PrewarmQuery(prefix, "recommender", until_s))
        return requests

    def _submit(self, user_id: str, request: Request) -> None:
        future = self._engine.submit(request)
        with self._lock:
            self._under_way.setdefault(user_id, []).append(future)
        future.add_done_callback(lambda done: self._ended(user_id, done))

    def _ended(self, user_id: str, future: Future[Result]) -> None:
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
