"""Roots of users who have just done something, and drafts for what they will ask, made before they
ask; and how all that is forgotten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future

from recserve.core.request import QueueFull, Request, Result, RootKeys, WarmRequest
from recserve.engine.runtime.scheduler import RequestTooLarge
from recserve.schemas.items import UserRef
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.history.histories import NOTHING, History, Rewritten
from recserve.service.recommend.roots import RankerRoots, RecommenderRoots
from recserve.service.recommend.usual import Usual
from recserve.service.runtime import Runtime

WITHIN_S = 10.0  # what was not begun by then is not worth it: the user has asked, or has left


class Warming:
    """Asks the engine for roots and drafts, and waits for nothing."""

    def __init__(
        self,
        runtime: Runtime,
        recommender: RecommenderRoots | None,
        ranker: RankerRoots | None,
        usual: Usual | None = None,
    ) -> None:
        """usual: what drafts are made for. Each is None where there is no such model."""
        self.runtime = runtime
        self.recommender = recommender
        self.ranker = ranker
        self.usual = usual
        self._under_way: dict[str, list[Future[Result]]] = {}
        self._lock = threading.Lock()

    def warm(self, user_ids: Iterable[str]) -> int:
        """Roots that are under way; ends early where the queue is full. What was under way for a
        user before is dropped: there is more to read now.
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
        """Drop what is under way for these users, and every root that their histories have had, but
        for what the histories begin with still.
        """
        roots = [root for user, each in rewritten.items() for root in self._gone(user, each)]
        self.runtime.engine.forget(*roots)

    def _gone(self, user_id: str, rewritten: Rewritten) -> Iterator[RootKeys]:
        self._drop(user_id)
        before, snapshot = rewritten.before, self.runtime.snapshot
        left = NOTHING if rewritten.after is None else rewritten.after
        if self.recommender is not None:
            yield from self.recommender.grown(snapshot, before.rows, left.rows)
        if self.ranker is not None:
            yield from self.ranker.grown(snapshot, before, left)
            self.ranker.forget(None if rewritten.after is None else before)

    def _requests(self, user_id: str) -> list[Request]:
        snapshot = self.runtime.snapshot
        history = self.runtime.histories.read(UserRef(id=user_id), None, snapshot)
        if not history.rows.size:
            return []
        until_s = time.monotonic() + WITHIN_S
        requests: list[Request] = []
        if self.ranker is not None:
            root = self.ranker.bare(snapshot, history)
            requests.append(WarmRequest(root, "ranker", until_s))
        if self.recommender is not None:
            requests.append(self._of_recommender(self.recommender, snapshot, history, until_s))
        return requests

    def _of_recommender(
        self, roots: RecommenderRoots, snapshot: Snapshot, history: History, until_s: float
    ) -> Request:
        """The root, and a draft with it where the usual question would be answered from one."""
        root = roots.root(snapshot, history.rows)
        if self.runtime.warm_drafts and self.usual is not None:
            shape = self.usual.shape
            request = None if shape is None else shape.of(root, history, snapshot, until_s)
            if request is not None and self.runtime.engine.repeats(request):
                return request
        return WarmRequest(root, "recommender", until_s)

    def _submit(self, user_id: str, request: Request) -> None:
        future = self.runtime.engine.submit(request)
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
            self.runtime.engine.cancel(future)
