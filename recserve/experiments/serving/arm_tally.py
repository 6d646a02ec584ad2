"""Requests of one arm: totals since the start, and a sliding window of results."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

from recserve.experiments.serving.settings import MAX_WINDOW


@dataclass(frozen=True)
class ArmResult:
    """The result of one request.

    Attributes:
        seconds: Time until the answer; None if the request failed.
        failed: True if the server failed the request.
        empty: True if the answer has no item from a model, or no token.
    """

    seconds: float | None
    failed: bool = False
    empty: bool = False


@dataclass(frozen=True)
class Percentile:
    """A percentile with its interval.

    Attributes:
        value: The percentile.
        low: Lower end; None if there are too few values.
        high: Upper end; None if there are too few values.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class WindowSummary:
    """The requests of an arm within the window.

    Attributes:
        requests: Number of requests.
        errors: Number of failed requests.
        empty: Number of empty answers.
        seconds: Sorted latencies of the answered requests.
    """

    requests: int
    errors: int
    empty: int
    seconds: tuple[float, ...]


class ArmTally:
    """Counts the requests of one arm.

    Attributes:
        requests: Requests since the start of the server.
        errors: Failed requests.
        empty: Empty answers.
    """

    def __init__(self, window_s: float) -> None:
        """Starts at zero.

        Args:
            window_s: Length of the window; it holds at most MAX_WINDOW requests.
        """
        self.requests = 0
        self.errors = 0
        self.empty = 0
        self._window_s = window_s
        self._recent: deque[tuple[float, ArmResult]] = deque(maxlen=MAX_WINDOW)

    def add(self, result: ArmResult, now_s: float) -> None:
        """Adds a result; now_s is a time.monotonic() value."""
        self.requests += 1
        self.errors += result.failed
        self.empty += result.empty
        self._recent.append((now_s, result))

    def forget(self) -> None:
        """Empties the window; the totals stay."""
        self._recent.clear()

    def window(self, now_s: float) -> WindowSummary:
        """Returns the requests of the last `window_s` seconds."""
        while self._recent and self._recent[0][0] < now_s - self._window_s:
            self._recent.popleft()
        results = [result for _, result in self._recent]
        return WindowSummary(
            requests=len(results),
            errors=sum(result.failed for result in results),
            empty=sum(result.empty for result in results),
            seconds=tuple(sorted(r.seconds for r in results if r.seconds is not None)),
        )


def percentile(ordered: tuple[float, ...], share: float, confidence: float) -> Percentile | None:
    """Returns a percentile and its interval by order statistics; None without values.

    The ranks of the interval come from the binomial distribution in its normal approximation. They
    assume independent requests, so the interval is a guide. `recserve ab` has better ones.

    Args:
        ordered: Values in ascending order.
        share: 0.99 for the 99th percentile.
        confidence: Two-sided confidence of the interval, such as 0.95.
    """
    count = len(ordered)
    if not count:
        return None
    spread = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread) - 1, math.ceil(count * share + spread)
    return Percentile(
        value=ordered[min(count - 1, math.ceil(count * share) - 1)],
        low=ordered[low] if low >= 0 else None,
        high=ordered[high] if high < count else None,
    )
