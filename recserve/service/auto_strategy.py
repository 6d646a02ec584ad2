"""Chooses the strategy for `auto`: exact if the deadline allows it, otherwise a faster one.

Expected times are running means of this server's own answers. They include the time in the queue,
so that they rise with the load. `speculative` is preferred to `beam`: where drafts do not pay
(search/strategies/speculative.py), it runs beam search, and the answer names `beam`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recserve.search.strategy import strategy_classes

AUTO = "auto"
SPECULATIVE, BEAM = "speculative", "beam"
# Weight of the newest answer in the running mean of answer times.
MEAN_WEIGHT = 0.1
# An answer is expected in time if its mean time, times this factor, fits into the time left.
DEADLINE_MARGIN = 1.5
# Each refusal lowers the expected time of the refused strategy, so that it is tried again.
RETRY_DECAY = 0.98


@dataclass(frozen=True)
class AutoSetting:
    """What validation chose for `auto`, for requests that keep or filter seen items.

    Attributes:
        strategy: Name of the strategy. `beam` stands for the exact strategy of the engine.
        dense_weight: Weight of the dense head.
    """

    strategy: str
    dense_weight: float


def read_auto(recommender: Mapping[str, Any]) -> dict[str, AutoSetting]:
    """Returns the settings of `auto` by column, `kept` or `filtered`; empty without a calibration.

    Args:
        recommender: The manifest's section of the recommender, checked when it was opened.
    """
    settings = recommender.get("auto") or {}
    return {
        column: AutoSetting(values["strategy"], float(values["dense_weight"]))
        for column, values in settings.items()
    }


class StrategyChooser:
    """Chooses strategies by running means of answer times.

    There is one mean per strategy and power of two of the beam width.

    Attributes:
        exact: The exact strategy to use without time pressure; empty if the engine has none.
        quick: Strategies for requests with too little time, in order of preference.
    """

    def __init__(self, there: Sequence[str]) -> None:
        """Reads the role of each strategy from the registry.

        Args:
            there: Names of the engine's strategies.
        """
        roles = [(each.auto, name) for name, each in strategy_classes().items() if name in there]
        order = ("preferred", "default", "fallback")
        self.exact = next((name for role in order for r, name in roles if r == role), "")
        self.quick = tuple(name for role, name in roles if role == "hurried")
        self._seconds: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    def choose(
        self, width: int, deadline_s: float | None, chosen: str | None = None
    ) -> tuple[str, bool]:
        """Chooses the strategy for a request.

        Args:
            width: Beam width.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.
            chosen: Strategy to use without time pressure; None means `exact`.

        Returns:
            Name of the strategy, and True if the chosen one was expected to miss the deadline.
        """
        first = self.exact if chosen is None else chosen
        if deadline_s is None or not self.quick:
            return first, False
        left = deadline_s - time.monotonic()
        with self._lock:
            expected = self._estimate_s(first, width)
            if not expected or expected * DEADLINE_MARGIN <= left:
                return first, False
            # Without this decay a strategy that once was slow would never be measured again.
            self._seconds[first, width.bit_length()] = expected * RETRY_DECAY
            in_time = [
                n for n in self.quick if self._estimate_s(n, width) * DEADLINE_MARGIN <= left
            ]
        return (in_time or self.quick)[0], True

    def record(self, strategy: str, width: int, seconds: float) -> None:
        """Adds an answer's time to the running mean.

        Args:
            strategy: Strategy of the answer.
            width: Beam width.
            seconds: Time from the request's arrival at the engine to its result.
        """
        key = (strategy, width.bit_length())
        with self._lock:
            before = self._seconds.get(key, seconds)
            self._seconds[key] = before + MEAN_WEIGHT * (seconds - before)

    def _estimate_s(self, strategy: str, width: int) -> float:
        """Returns seconds; 0 for an untried strategy, so that each one is tried once."""
        return self._seconds.get((strategy, width.bit_length()), 0.0)
