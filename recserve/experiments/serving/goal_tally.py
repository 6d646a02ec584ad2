"""Answers of one arm and the events that they led to, as sums over groups of users.

A user's group is a hash, so the tally has one size for any number of users, and two tallies of
equal settings could be added. `statistics/conversions.py` says why groups are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from recserve.experiments.statistics.conversions import NUM_BUCKETS, RateSums

# An event counts once per answer, item and type. An experiment remembers so many events for it.
MAX_SEEN = 100_000


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
