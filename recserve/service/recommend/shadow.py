"""Shadow traffic: repeats answered requests with a second strategy and compares the slates.

The shadow's slate is discarded after the comparison. A shadow request runs only while the engine's
queue is empty, so that it uses idle time.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from recserve.core.request import QueueFull, Result, Slate, SlateQuery, Timing
from recserve.engine.engine import Engine
from recserve.metrics import ShadowCounts
from recserve.search.strategies.registry import canonical_name, strategy_classes


class Shadow:
    """Compares a second strategy with the given answers on a share of the requests.

    Attributes:
        engine: Runs the shadow requests.
        strategy: Name of the second strategy.
        share: Fraction of the requests, 0 to 1.
        counts: Sums over all comparisons.
    """

    def __init__(self, engine: Engine, strategy: str, share: float, seed: int = 0) -> None:
        """Checks the strategy and the share.

        Raises:
            ValueError: If the engine lacks the strategy, or the share is not within 0 to 1.
        """
        strategy = canonical_name(strategy)
        if strategy not in engine.strategies:
            listed = ", ".join(engine.strategies)
            raise ValueError(f"shadow is {strategy!r}; this bundle offers {listed}")
        if not 0 <= share <= 1:
            raise ValueError(f"shadow_share is {share}; expected 0 to 1")
        self.engine, self.strategy, self.share = engine, strategy, share
        self.counts = ShadowCounts()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def follow(self, request: SlateQuery, given: Slate) -> None:
        """Repeats an answered request with the second strategy, if drawn and the engine is idle.

        Args:
            request: The answered request.
            given: Its slate.
        """
        if request.strategy == self.strategy or self._random.random() >= self.share:
            return
        if self.engine.stats().queue_depth:
            return
        again = replace(request, strategy=self.strategy, deadline_s=None)
        if strategy_classes()[self.strategy].dense_weight != "used":
            again = replace(again, dense_weight=0.0)
        try:
            future = self.engine.submit(again)
        except (QueueFull, RuntimeError, ValueError):
            return
        future.add_done_callback(lambda done: self._compare(given, done))

    def _compare(self, given: Slate, done: Future[Result]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        result = done.result()
        assert isinstance(result, Slate)
        with self._lock:
            shared = float(np.isin(result.rows, given.rows).sum())
            self.counts.shared += shared / max(given.rows.size, 1)
            self.counts.identical += bool(np.array_equal(result.rows, given.rows))
            self.counts.given_seconds += _engine_s(given.timing)
            self.counts.seconds += _engine_s(result.timing)
            self.counts.answers += 1


def _engine_s(timing: Timing) -> float:
    return (timing.total_ms - timing.queue_ms) / 1e3
