"""Drafts that are made on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.speculation.text import TextDraft


@dataclass(frozen=True)
class HostDraft:
    """A chosen draft in numpy. Columns [n] int64, as TextDraft's; depth: most nodes on a path."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depth: int
    kinds: NDArray[np.int64] | None = None
    proposers: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING = HostDraft(np.empty(0, np.int64), np.empty(0, np.int64), 0)


def chain(tokens: Seq[int]) -> HostDraft:
    """A draft without forks."""
    n = len(tokens)
    return HostDraft(np.array(tokens, np.int64), _parents(n), n)


@lru_cache(maxsize=256)
def _parents(n: int) -> NDArray[np.int64]:
    return np.arange(-1, n - 1)


def as_tensors(drafts: Seq[HostDraft]) -> list[TextDraft]:
    """The same drafts as tensors, on the host: a step uploads all of its trees at once."""
    return [
        TextDraft(
            torch.from_numpy(draft.tokens),
            torch.from_numpy(draft.parents),
            draft.depth,
            kinds=None if draft.kinds is None else torch.from_numpy(draft.kinds),
            proposers=None if draft.proposers is None else torch.from_numpy(draft.proposers),
        )
        for draft in drafts
    ]
