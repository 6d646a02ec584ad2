"""What an experiment counts: requests, latencies, answers, users, and the events that followed.

All counts of an experiment are one vector of whole numbers, `Counts`. Two vectors of equal settings
add up, so the counts of several servers are the counts of one server that did all of it. Events and
answers are sums over groups of users. A user's group is a hash, so the sums have one size for any
number of users; `conversions.py` says why groups are enough. Latencies are numbers in buckets;
`latencies.py` says how exact they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np

from recserve.experiments.conversions import NUM_BUCKETS, RateSums
from recserve.experiments.latencies import NUM_LATENCIES, Ints, bucket

# An event counts once per answer, item and type. An experiment remembers so many events for it.
MAX_SEEN = 100_000
NUM_SLICES = 20  # of a window
# What became of a request that the server of an arm got.
Forwarding = Literal["answered", "late", "failed", "refused", "busy"]
FORWARDINGS: tuple[Forwarding, ...] = get_args(Forwarding)
Cause = Literal["errors", "empty", "p99"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
Comparison = Literal["answers", "shared", "identical", "dropped"]
COMPARISONS: tuple[Comparison, ...] = get_args(Comparison)
SHARED_UNIT = 10**9  # the sum `shared` counts billionths


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
class Requests:
    """The requests of an arm.

    Attributes:
        requests: Number of requests.
        errors: Number of failed requests.
        empty: Number of empty answers.
        latencies: [NUM_LATENCIES] answered requests by latency.
    """

    requests: int
    errors: int
    empty: int
    latencies: Ints

    @property
    def num_timed(self) -> int:
        """Number of answered requests."""
        return int(self.latencies.sum())

    def since(self, before: Requests) -> Requests:
        """Returns the requests after earlier ones."""
        return Requests(
            self.requests - before.requests,
            self.errors - before.errors,
            self.empty - before.empty,
            self.latencies - before.latencies,
        )


class Counts:
    """All counts of an experiment in one vector, and the parts of it by their names.

    The vector begins with what a window has too, the results of requests:

        results    [A, 3]                requests, errors, empty answers
        other      [A, 2]                attributed events of other types, users
        forwarded  [A, 5]                requests for an arm's own server, in order of FORWARDINGS
        fallbacks  [3]                   automatic fall-backs, in order of CAUSES
        compared   [4]                   in order of COMPARISONS
        latencies  [A, NUM_LATENCIES]    answered requests by latency
        answers    [A, NUM_BUCKETS]      answers by group of users
        events     [A, G, NUM_BUCKETS]   events of each goal by group of users

    Attributes:
        values: The vector, int64.
        goals: Event types that are counted; the first one decides.
        num_head: Length of the part before the latencies.
        num_window: Length of the part up to the latencies.
    """

    def __init__(self, num_arms: int, goals: Sequence[str], values: Ints | None = None) -> None:
        """Starts at zero.

        Args:
            num_arms: Number of arms.
            goals: Event types that are counted.
            values: The vector; None starts at zero. A shorter one has the first parts only.
        """
        self.goals = tuple(goals)
        shapes = {
            "results": (num_arms, 3),
            "other": (num_arms, 2),
            "forwarded": (num_arms, len(FORWARDINGS)),
            "fallbacks": (len(CAUSES),),
            "compared": (len(COMPARISONS),),
            "latencies": (num_arms, NUM_LATENCIES),
            "answers": (num_arms, NUM_BUCKETS),
            "events": (num_arms, len(goals), NUM_BUCKETS),
        }
        size = sum(map(math.prod, shapes.values()))
        self.values = np.zeros(size, np.int64) if values is None else values
        self.places: dict[str, int] = {}
        first = 0
        for name, shape in shapes.items():
            self.places[name] = first
            part = self.values[first : first + math.prod(shape)]
            first += math.prod(shape)
            if part.size == math.prod(shape):
                setattr(self, name, part.reshape(shape))
        self.num_head, self.num_window = self.places["latencies"], self.places["answers"]

    results: Ints
    other: Ints
    forwarded: Ints
    fallbacks: Ints
    compared: Ints
    latencies: Ints
    answers: Ints
    events: Ints

    def requests(self, arm: int) -> Requests:
        """Returns a copy of the requests of an arm."""
        requests, errors, empty = self.results[arm].tolist()
        return Requests(requests, errors, empty, self.latencies[arm].copy())

    def sums(self, arm: int, goal: int) -> RateSums:
        """Returns a copy of the sums of an arm's goal."""
        return RateSums(self.answers[arm].copy(), self.events[arm, goal].copy())

    def result_places(self, arm: int, result: ArmResult) -> list[int]:
        """Returns the places of the vector that a result adds 1 to."""
        first = self.places["results"] + 3 * arm
        places = [first]
        if result.failed:
            places.append(first + 1)
        if result.empty:
            places.append(first + 2)
        if result.seconds is not None:
            places.append(self.num_head + NUM_LATENCIES * arm + bucket(result.seconds))
        return places

    def event_place(self, arm: int, goal: int, group: int) -> int:
        """Returns the place of the vector that an event adds 1 to."""
        return self.places["events"] + (arm * len(self.goals) + goal) * NUM_BUCKETS + group


class Window:
    """Sums of the last seconds, in NUM_SLICES slices of time; the oldest one leaves as a whole.

    Attributes:
        slice_s: Length of a slice.
    """

    def __init__(self, window_s: float, size: int) -> None:
        """Starts empty.

        Args:
            window_s: Length of the window.
            size: Length of the vectors.
        """
        self.slice_s = window_s / NUM_SLICES
        self._size = size
        self._slices: dict[int, Ints] = {}

    def current(self, now_s: float) -> Ints:
        """Returns the vector of the present slice, to add to."""
        number = math.floor(now_s / self.slice_s)
        if number not in self._slices:
            self.put(number, np.zeros(self._size, np.int64))
        return self._slices[number]

    def put(self, number: int, values: Ints) -> None:
        """Replaces a slice, and drops those that have left the window."""
        self._slices[number] = values
        last = max(self._slices) - NUM_SLICES
        for old in [one for one in self._slices if one <= last]:
            del self._slices[old]

    def sums(self, now_s: float) -> Ints:
        """Returns the sums of the window."""
        first = math.floor(now_s / self.slice_s) - NUM_SLICES
        found = np.zeros(self._size, np.int64)
        for number, values in self._slices.items():
            if number > first:
                found += values
        return found

    def clear(self) -> None:
        """Empties the window."""
        self._slices.clear()


def slice_ms(window_s: float) -> int:
    """Returns the time of a slice of a window that several servers share."""
    return max(50, round(1e3 * window_s / NUM_SLICES))


class SeenEvents:
    """Remembers the newest MAX_SEEN events, so that an event which comes again does not count."""

    def __init__(self, keys: Sequence[int] = ()) -> None:
        self._keys = dict.fromkeys(keys)

    def add(self, key: str) -> bool:
        """Remembers an event. Returns False if it is remembered already."""
        number = hash_number(key, 8)
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
    return hash_number(f"{seed}\0{unit}", 4) % NUM_BUCKETS


def hash_number(text: str, num_bytes: int) -> int:
    """Returns a hash that is the same in all processes."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=num_bytes)
    return int.from_bytes(digest.digest(), "little")


def to_bytes(sums: Ints) -> bytes:
    """Returns numbers as int64 little-endian."""
    return sums.astype("<i8").tobytes()


def from_bytes(content: bytes, size: int) -> Ints:
    """Returns the counts that `to_bytes` wrote.

    Raises:
        ValueError: If there are not so many, or one is negative.
    """
    if len(content) != 8 * size:
        raise ValueError(f"expected {size} numbers of 8 bytes, got {len(content)} bytes")
    counts = np.frombuffer(content, "<i8").astype(np.int64)
    if (counts < 0).any():
        raise ValueError(f"a count is {counts.min()}; expected 0 or more")
    return counts
