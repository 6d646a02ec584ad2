"""Prefixes of semantic ids that the target has scored, with what it said, by their keys.

The key of a prefix is `request number * nodes of the trie + trie node`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.cpu.native import compiled


@dataclass(frozen=True)
class Scored:
    """keys [n]: ascending. slots [n]: pool slot of the node's keys and values. hidden [n, E]: final
    hidden state at the node.
    """

    keys: Tensor
    slots: Tensor
    hidden: Tensor

    def find(self, keys: Tensor) -> Tensor:
        """Row of each key, -1 where it is not scored. keys: any shape; same shape back."""
        if not self.keys.shape[0]:
            return torch.full_like(keys, -1)
        row = torch.searchsorted(self.keys, keys).clamp(max=self.keys.shape[0] - 1)
        return torch.where(self.keys[row] == keys, row, -1)

    def add(self, keys: Tensor, slots: Tensor, hidden: Tensor) -> Scored:
        """With m more prefixes, in any order, none of which is here already."""
        if dispatch.in_native(hidden):
            return _added(self, keys, slots, hidden.contiguous())
        keys, order = torch.sort(torch.cat([self.keys, keys]))
        slots = torch.cat([self.slots, slots])[order]
        return Scored(keys, slots, torch.cat([self.hidden, hidden])[order])


def nothing_scored(like: Tensor) -> Scored:
    """The empty table, for hidden states like the given ones [n, E]."""
    empty = torch.empty(0, dtype=torch.int64, device=like.device)
    return Scored(empty, empty, like[:0])


def _added(before: Scored, keys: Tensor, slots: Tensor, hidden: Tensor) -> Scored:
    """The same in C."""
    count, size = before.keys.shape[0] + keys.shape[0], hidden.shape[1]
    both = Scored(
        torch.empty(count, dtype=torch.int64),
        torch.empty(count, dtype=torch.int64),
        torch.empty(count, size, dtype=hidden.dtype),
    )
    compiled().scored_table(
        before.keys.shape[0],
        before.keys.data_ptr(),
        before.slots.data_ptr(),
        before.hidden.data_ptr(),
        keys.shape[0],
        keys.data_ptr(),
        slots.data_ptr(),
        hidden.data_ptr(),
        both.keys.data_ptr(),
        both.slots.data_ptr(),
        both.hidden.data_ptr(),
        size * hidden.itemsize,
    )
    return both
