"""What an experiment counts for each arm: requests, answers, and the events that followed.

Requests have totals since the start and a sliding window of results. Events have sums over groups
of users. A user's group is a hash, so the sums have one size for any number of users, and two
tallies of equal settings could be added. `conversions.py` says why groups are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from recserve.experiments.conversions import NUM_BUCKETS, RateSums
from recserve.experiments.settings import MAX_WINDOW

# An event counts once per answer, item and type. An experiment remembers so many events for it.
MAX_SEEN = 100_000


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
    seconds: NDArray[np.float64]


class ArmTally:
    """Counts the requests of one arm.

    Attributes:
        requests: Requests since the start of the experiment.
        errors: Failed requests.
        empty: Empty answers.
        before: Requests, failed requests and empty answers before the last start.
    """

    def __init__(self, window_s: float) -> None:
        """Starts at zero.

        Args:
            window_s: Length of the window; it holds at most MAX_WINDOW requests.
        """
        self.requests = 0
        self.errors = 0
        self.empty = 0
        self.before = (0, 0, 0)
        self._window_s = window_s
        self._place = 0
        # Ring buffers: a deque of 10,000 results would stall the event loop at each look.
        self._at_s = np.full(MAX_WINDOW, -math.inf)
        self._seconds = np.full(MAX_WINDOW, math.nan)
        self._failed = np.zeros(MAX_WINDOW, np.bool_)
        self._empty = np.zeros(MAX_WINDOW, np.bool_)

    def add(self, result: ArmResult, now_s: float) -> None:
        """Adds a result; now_s is a time.monotonic() value."""
        place = self._place
        self._place = (place + 1) % MAX_WINDOW
        self.requests += 1
        self.errors += result.failed
        self.empty += result.empty
        self._at_s[place] = now_s
        self._seconds[place] = math.nan if result.seconds is None else result.seconds
        self._failed[place] = result.failed
        self._empty[place] = result.empty

    def restore(self, requests: int, errors: int, empty: int, before: tuple[int, int, int]) -> None:
        """Continues the totals of an earlier process; the window stays empty."""
        self.requests, self.errors, self.empty, self.before = requests, errors, empty, before

    def forget(self) -> None:
        """Empties the window and begins `since_start`; the totals stay."""
        self._at_s.fill(-math.inf)
        self.before = (self.requests, self.errors, self.empty)

    def window(self, now_s: float) -> WindowSummary:
        """Returns the requests of the last `window_s` seconds."""
        return self._summary(self._at_s >= now_s - self._window_s)

    def latest(self) -> WindowSummary:
        """Returns the last requests, MAX_WINDOW at most, of any age since `forget`."""
        return self._summary(self._at_s > -math.inf)

    def since_start(self) -> WindowSummary:
        """Returns the counts since `forget`, with the latencies of `latest`."""
        requests, errors, empty = self.before
        return WindowSummary(
            requests=self.requests - requests,
            errors=self.errors - errors,
            empty=self.empty - empty,
            seconds=self.latest().seconds,
        )

    def _summary(self, inside: NDArray[np.bool_]) -> WindowSummary:
        seconds = self._seconds[inside]
        return WindowSummary(
            requests=int(inside.sum()),
            errors=int(self._failed[inside].sum()),
            empty=int(self._empty[inside].sum()),
            seconds=np.sort(seconds[~np.isnan(seconds)]),
        )


def percentile(ordered: NDArray[np.float64], share: float, confidence: float) -> Percentile | None:
    """Returns a percentile and its interval by order statistics; None without values.

    The ranks of the interval come from the binomial distribution in its normal approximation. They
    assume independent requests, so the interval is a guide. `recserve ab` has better ones.

    Args:
        ordered: [n] values in ascending order.
        share: 0.99 for the 99th percentile.
        confidence: Two-sided confidence of the interval, such as 0.95.
    """
    count = len(ordered)
    if not count:
        return None
    spread = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread) - 1, math.ceil(count * share + spread)
    return Percentile(
        value=float(ordered[min(count - 1, math.ceil(count * share) - 1)]),
        low=float(ordered[low]) if low >= 0 else None,
        high=float(ordered[high]) if high < count else None,
    )


class GoalTally:
    """Counts the answers and the attributed events of one arm.

    Attributes:
        goals: Event types that are counted; the first one decides.
        answers: [NUM_BUCKETS] answers by group of users.
        events: By goal, [NUM_BUCKETS] events by group of users.
        other_events: Attributed events of other types.
    """

    def __init__(self, goals: Sequence[str]) -> None:
        self.goals = tuple(goals)
        self.answers = np.zeros(NUM_BUCKETS, np.int64)
        self.events = {goal: np.zeros(NUM_BUCKETS, np.int64) for goal in goals}
        self.other_events = 0

    def add_answer(self, group: int) -> None:
        """Counts an answer for a group of users."""
        self.answers[group] += 1

    def add_event(self, group: int, event_type: str) -> None:
        """Counts an event that an answer led to."""
        if event_type in self.events:
            self.events[event_type][group] += 1
        else:
            self.other_events += 1

    def sums(self, goal: str) -> RateSums:
        """Returns a copy of the sums of a goal."""
        return RateSums(self.answers.copy(), self.events[goal].copy())


class SeenEvents:
    """Remembers the newest MAX_SEEN events, so that an event which comes again does not count."""

    def __init__(self, keys: Sequence[int] = ()) -> None:
        self._keys = dict.fromkeys(keys)

    def add(self, key: str) -> bool:
        """Remembers an event. Returns False if it is remembered already."""
        number = _hash(key, 8)
        if number in self._keys:
            return False
        self._keys[number] = None
        if len(self._keys) > MAX_SEEN:
            del self._keys[next(iter(self._keys))]
        return True

    def keys(self) -> list[int]:
        """Returns hashes of the events, oldest first."""
        return list(self._keys)


def user_group(seed: str, unit: str) -> int:
    """Returns the group of a user, which does not depend on the arm."""
    return _hash(f"{seed}\0{unit}", 4) % NUM_BUCKETS


def _hash(text: str, size: int) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size)
    return int.from_bytes(digest.digest(), "little")
