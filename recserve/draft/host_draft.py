"""Drafts that were made on the host, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.core.text import TextDraft
from recserve.kernels.tree import CANDIDATE


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
    return HostDraft(np.array(tokens, np.int64), np.arange(-1, n - 1), n)


def upload(drafts: Seq[HostDraft], device: torch.device | str) -> list[TextDraft]:
    """The same drafts as tensors; one copy to the device for all of them."""
    if torch.device(device).type == "cpu":
        return [_in_place(draft) for draft in drafts]
    sizes = [len(draft) for draft in drafts]
    columns = np.empty((4, sum(sizes)), np.int64)
    stop = 0
    for draft, size in zip(drafts, sizes, strict=True):
        start, stop = stop, stop + size
        columns[0, start:stop] = draft.tokens
        columns[1, start:stop] = draft.parents
        columns[2, start:stop] = CANDIDATE if draft.kinds is None else draft.kinds
        columns[3, start:stop] = 0 if draft.proposers is None else draft.proposers
    packed = torch.split(torch.from_numpy(columns).to(device), sizes, dim=1)
    return [
        TextDraft(
            rows[0],
            rows[1],
            draft.depth,
            kinds=None if draft.kinds is None else rows[2],
            proposers=None if draft.proposers is None else rows[3],
        )
        for draft, rows in zip(drafts, packed, strict=True)
    ]


def _in_place(draft: HostDraft) -> TextDraft:
    kinds, proposers = draft.kinds, draft.proposers
    return TextDraft(
        torch.from_numpy(draft.tokens),
        torch.from_numpy(draft.parents),
        draft.depth,
        kinds=None if kinds is None else torch.from_numpy(kinds),
        proposers=None if proposers is None else torch.from_numpy(proposers),
    )
