"""Which strategy `auto` is: exact where the deadline allows it, the fastest good one where not.

Times are what this server's own answers took, waiting in the queue included, so that a rising load
is seen as it comes. `speculative` is preferred to `beam`: it is beam search where drafts do not pay
(search/draft_plan.py), and the answer then says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from recserve.search.strategies.registry import strategy_classes

AUTO = "auto"
SPECULATIVE, BEAM = "speculative", "beam"
# Weight of the newest answer in the running mean of answer times.
MEAN_WEIGHT = 0.1
# An answer is expected in time if its mean time, times this factor, fits into the time left.
DEADLINE_MARGIN = 1.5
# Each refusal lowers the expected time of the refused strategy, so that it is tried again.
RETRY_DECAY = 0.98


@dataclass(frozen=True)
class Choice:
    """strategy: its name. hurried: an exact one would have come too late."""

    strategy: str
    hurried: bool = False


class Chooser:
    """Running means of what answers took, by strategy and beam width (powers of two)."""

    def __init__(self, there: Sequence[str]) -> None:
        """there: the engine's strategies."""
        roles = [(each.auto, name) for name, each in strategy_classes().items() if name in there]
        order = ("preferred", "default", "fallback")
        self.exact = next((name for role in order for r, name in roles if r == role), "")
        self.quick = tuple(name for role, name in roles if role == "hurried")
        self._seconds: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    def choose(self, width: int, deadline_s: float | None) -> Choice:
        """deadline_s: of time.monotonic(), None: there is no hurry."""
        if deadline_s is None or not self.quick:
            return Choice(self.exact)
        left = deadline_s - time.monotonic()
        with self._lock:
            expected = self._expected(self.exact, width)
            if not expected or expected * DEADLINE_MARGIN <= left:
                return Choice(self.exact)
            self._seconds[self.exact, width.bit_length()] = expected * RETRY_DECAY
            in_time = [n for n in self.quick if self._expected(n, width) * DEADLINE_MARGIN <= left]
        return Choice((in_time or self.quick)[0], hurried=True)

    def took(self, strategy: str, width: int, seconds: float) -> None:
        """Note an answer's time."""
        key = (strategy, width.bit_length())
        with self._lock:
            before = self._seconds.get(key, seconds)
            self._seconds[key] = before + MEAN_WEIGHT * (seconds - before)

    def _expected(self, strategy: str, width: int) -> float:
        """Seconds; 0 where nothing is known, so that everything is tried once."""
        return self._seconds.get((strategy, width.bit_length()), 0.0)
