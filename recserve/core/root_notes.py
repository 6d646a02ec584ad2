"""What follows from a root's last state and is kept beside it: it goes when the root does."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from recserve.core.request import RecommendRequest
from recserve.kernels.trie_overlay import AnyTrie


@dataclass(frozen=True)
class KeptDraft:
    """Prefixes that a draft head thinks likely behind a root.

    nodes [n]: of the trie. width, place: how many of each length were kept, and the place of the
    item that set the floor. excluded: what the request did not want.
    """

    trie: weakref.ref[AnyTrie]
    width: int
    place: int
    excluded: np.ndarray | None
    nodes: Tensor

    def fits(self, request: RecommendRequest, width: int, place: int) -> bool:
        """Whether the head would draft the same for this request."""
        return (
            self.trie() is request.trie
            and (self.width, self.place) == (width, place)
            and request.allowed is None
            and _same(self.excluded, request.excluded)
        )


@dataclass
class RootNotes:
    """Of one cached root. draft: the newest one, None: none was made."""

    draft: KeptDraft | None = None


def _same(one: np.ndarray | None, two: np.ndarray | None) -> bool:
    if one is None or two is None:
        return (one is None or not one.size) and (two is None or not two.size)
    return np.array_equal(one, two)
