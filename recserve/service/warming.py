"""Roots of users who have just done something, computed before they ask."""

from __future__ import annotations

from collections.abc import Iterable

from recserve.core.request import QueueFull, WarmRequest
from recserve.engine.lane import RequestTooLarge
from recserve.messages import UserRef
from recserve.service.roots import RankerRoots, RecommenderRoots
from recserve.service.runtime import Runtime


class Warming:
    """Asks the engine for roots and waits for nothing."""

    def __init__(
        self, runtime: Runtime, recommender: RecommenderRoots | None, ranker: RankerRoots | None
    ) -> None:
        self.runtime = runtime
        self.recommender = recommender
        self.ranker = ranker

    def warm(self, user_ids: Iterable[str]) -> int:
        """Roots that are under way; ends early where the queue is full."""
        begun = 0
        for user_id in user_ids:
            try:
                for request in self._requests(user_id):
                    self.runtime.engine.submit(request)
                    begun += 1
            except (QueueFull, RequestTooLarge):
                break
        return begun

    def _requests(self, user_id: str) -> list[WarmRequest]:
        snapshot = self.runtime.snapshot
        history = self.runtime.histories.read(UserRef(id=user_id), None, snapshot)
        if not history.rows.size:
            return []
        requests = []
        if self.ranker is not None:
            requests.append(WarmRequest(self.ranker.bare(snapshot, history), "ranker"))
        if self.recommender is not None:
            root = self.recommender.root(snapshot, history.rows)
            requests.append(WarmRequest(root, "recommender"))
        return requests
