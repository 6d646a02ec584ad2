"""Team-draft interleaving: one slate from the slates of two arms, and the team of each item.

The teams travel in the attribution token, so that a click is credited without any memory of
slates. Each item of a slate has a mark of three bytes: 23 bits of a hash of its id, and its team.

Source: Radlinski, Kurup and Joachims 2008, "How does clickthrough data reflect retrieval quality?".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import TypeVar

MARK_BYTES = 3
# Marks of a token. A token with more would be longer than the server reads.
MAX_MARKS = 500
T = TypeVar("T")


def team_draft(
    first: Sequence[T],
    second: Sequence[T],
    key: Callable[[T], Hashable],
    k: int,
    drawn: random.Random,
) -> list[tuple[T, int]]:
    """Interleaves two slates.

    The team with fewer picks goes next; a coin decides between equal teams. A team picks its best
    item that the slate does not have yet.

    Args:
        first: Slate of team 0, best first.
        second: Slate of team 1, best first.
        key: Identifies an item.
        k: Most items of the result.
        drawn: Source of the coins.

    Returns:
        Items with the number of their team, best first.
    """
    slates = (list(first), list(second))
    picks = [0, 0]
    taken: set[Hashable] = set()
    slate: list[tuple[T, int]] = []
    while len(slate) < k:
        for left in slates:
            while left and key(left[0]) in taken:
                left.pop(0)
        if not slates[0] and not slates[1]:
            break
        team = drawn.randrange(2) if picks[0] == picks[1] else int(picks[1] < picks[0])
        if not slates[team]:
            team = 1 - team
        item = slates[team].pop(0)
        taken.add(key(item))
        picks[team] += 1
        slate.append((item, team))
    return slate


def mark_teams(slate: Sequence[tuple[str, int]]) -> bytes:
    """Returns the marks of the first MAX_MARKS items of a slate.

    Args:
        slate: Ids of the shown items, each with the number of its team.
    """
    return b"".join(_mark(item_id, team) for item_id, team in slate[:MAX_MARKS])


def team_of(item_id: str, marks: bytes) -> int | None:
    """Returns the team of an item; None if the slate did not show it."""
    wanted = [_mark(item_id, team) for team in (0, 1)]
    for place in range(0, len(marks), MARK_BYTES):
        mark = marks[place : place + MARK_BYTES]
        if mark in wanted:
            return wanted.index(mark)
    return None


def _mark(item_id: str, team: int) -> bytes:
    digest = blake2b(item_id.encode("utf-8", "surrogatepass"), digest_size=MARK_BYTES).digest()
    return digest[:-1] + bytes([digest[-1] & 0xFE | team])
