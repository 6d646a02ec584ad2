"""One simulated replica: a queue that is served in batches, and a prefix cache of users."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from benchmarks.scale.traffic import Arrivals


@dataclass(frozen=True)
class StepCosts:
    """Time of a batch in ms: `fixed`, and one of the others for each of its requests.

    Attributes:
        fixed_ms: Whatever the batch holds.
        warm_ms: A user whose prefix is cached.
        event_ms: A user whose prefix is cached but for one new event.
        cold_ms: A user who is not in the cache.
    """

    fixed_ms: float
    warm_ms: float
    event_ms: float
    cold_ms: float

    def mean_ms(self, hit_share: float, event_share: float, batch: float) -> float:
        """Returns the mean time of a request in batches of `batch`."""
        hit_ms = self.warm_ms + (self.event_ms - self.warm_ms) * event_share
        return self.fixed_ms / batch + hit_share * hit_ms + (1 - hit_share) * self.cold_ms


@dataclass(frozen=True)
class ReplicaShape:
    """Limits of a replica.

    Attributes:
        costs: Time of a batch.
        cached_users: Prefixes that the KV cache holds.
        max_batch: Most requests of a batch.
        deadline_s: A request that waits longer is refused.
    """

    costs: StepCosts
    cached_users: int
    max_batch: int = 32
    deadline_s: float = 1.0


@dataclass(frozen=True)
class Served:
    """What became of the requests of a window.

    Attributes:
        latencies_s: [answered] float64.
        hits: Answered requests whose prefix was cached.
        refused: Requests that waited too long.
        busy_s: Time in which the replica worked.
    """

    latencies_s: np.ndarray
    hits: int
    refused: int
    busy_s: float


class SimulatedReplica:
    """Serves requests in the order of arrival. All that wait when a batch begins join it."""

    def __init__(self, shape: ReplicaShape) -> None:
        """Starts with an empty cache."""
        self.shape = shape
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.free_at_s = 0.0

    def serve(self, arrivals: Arrivals) -> Served:
        """Serves the requests of a window; the queue may last into the next one."""
        costs, shape, cache = self.shape.costs, self.shape, self.cache
        fixed_s, warm_s = costs.fixed_ms / 1e3, costs.warm_ms / 1e3
        event_s, cold_s = costs.event_ms / 1e3, costs.cold_ms / 1e3
        times = arrivals.times_s.tolist()
        users = arrivals.users.tolist()
        fresh = arrivals.fresh.tolist()
        finished = np.full(len(times), np.nan)
        now_s, busy_s, hits, refused, i = self.free_at_s, 0.0, 0, 0, 0
        while i < len(times):
            start_s = max(now_s, times[i])
            if start_s - times[i] > shape.deadline_s:
                refused += 1
                i += 1
                continue
            end = bisect_right(times, start_s, i, min(len(times), i + shape.max_batch))
            step_s = fixed_s
            for j in range(i, end):
                user = users[j]
                if user in cache:
                    cache.move_to_end(user)
                    hits += 1
                    step_s += event_s if fresh[j] else warm_s
                else:
                    cache[user] = None
                    if len(cache) > shape.cached_users:
                        cache.popitem(last=False)
                    step_s += cold_s
            now_s = start_s + step_s
            busy_s += step_s
            finished[i:end] = now_s
            i = end
        self.free_at_s = now_s
        answered = ~np.isnan(finished)
        return Served(finished[answered] - arrivals.times_s[answered], hits, refused, busy_s)
