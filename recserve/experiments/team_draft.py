"""Team-draft interleaving: one slate from the slates of two arms, and the team of each item.

The teams travel in the attribution token, so that a click is credited without any memory of
slates.

Source: Radlinski, Kurup and Joachims 2008, "How does clickthrough data reflect retrieval quality?".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

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
