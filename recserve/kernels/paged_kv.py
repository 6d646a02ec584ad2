"""Keys and values in pages, and where the keys of a packed batch of trees lie.

A page is S consecutive slots; a slot holds one token's key and value in every layer. Pages are
handed out by the engine; this file only knows addresses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.fp8 import clear_rows, copy_rows, put, vector_bytes, zeros
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree


@dataclass(frozen=True)
class KVShape:
    """Size of one token's cache. num_layers, num_kv_heads K, head_dim D."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one slot, keys and values of all layers, in a pool of this type."""
        return 2 * self.num_layers * self.num_kv_heads * vector_bytes(self.head_dim, dtype)


class KVPool:
    """All pages of one model. keys, values: [num_layers, (P + 1) * S, K, D]; dtype: a float type or
    FP8.

    The page after the last is handed out to nobody: what fills up a batch is written to its
    first slot, `spare_slot`.
    """

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spare_slot = num_pages * page_size
        slots = self.spare_slot + page_size
        size = (shape.num_layers, slots, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        # A masked key may still be read and weighed by zero, so unwritten slots must be finite.
        self.keys = zeros(size, dtype, device)
        self.values = zeros(size, dtype, device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store n tokens of one layer. slots [n] distinct; key, value [n, K, D]."""
        put(self.keys[layer], slots, key)
        put(self.values[layer], slots, value)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy tokens of all layers from one place to another. source, target [n]; all are read
        before one is written.
        """
        copy_rows(self.keys, 1, source, target)
        copy_rows(self.values, 1, source, target)

    def clear_slots(self, slots: Tensor) -> None:
        """Write zeros to slots [n]: NaN would spread from there to whoever weighs a masked key by
        zero.
        """
        clear_rows(self.keys, 1, slots)
        clear_rows(self.values, 1, slots)


def slots_of_pages(pages: Seq[int], page_size: int, device: torch.device) -> Tensor:
    """[n * page_size] slots of the tokens kept in n pages, in order."""
    slots = np.array(pages, np.int64)[:, None] * page_size + np.arange(page_size)
    return on_device(slots.ravel(), device)


@dataclass(frozen=True)
class RootTable:
    """Roots of B trees as rows of one table, so that no shape depends on how long they are.

    slots [R, W]: pool slots of some sequences' tokens, in order, side by side in each row. rows
    [B], lengths [B]: tree b stands on slots[rows[b], :lengths[b]]; what lies behind is never read.
    """

    slots: Tensor
    rows: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class TreeBatch:
    """Trees of one forward, and the place of every key they read.

    tree: all nodes, those computed now and those computed in an earlier forward.
    queries [Tq]: the nodes computed now, ascending; None: all of them.
    slots [T]: pool slot of each node; nodes in `queries` are written there, others are read from
    there.
    root_slots: for each tree the slots of its root, in order; or all of them in a table.
    counts [B]: computed nodes of each tree, None: the host does not know.
    """

    tree: TokenTree
    queries: Tensor | None
    slots: Tensor
    root_slots: tuple[Tensor, ...] | RootTable
    counts: list[int] | None = None

    @property
    def num_queries(self) -> int:
        """Tq."""
        return self.tree.num_nodes if self.queries is None else self.queries.shape[0]

    def query_slots(self) -> Tensor:
        """[Tq] where the keys and values computed now are stored."""
        return self.slots if self.queries is None else self.slots[self.queries]

    def root_lengths(self) -> Tensor:
        """[B] root tokens of each tree."""
        if isinstance(self.root_slots, RootTable):
            return self.root_slots.lengths
        lengths = [slots.shape[0] for slots in self.root_slots]
        return on_device(lengths, self.slots.device)

    def positions(self) -> Tensor:
        """[Tq] absolute position of each computed node: root length + depth."""
        depths = self.tree.depths if self.queries is None else self.tree.depths[self.queries]
        if isinstance(self.root_slots, tuple) and len(self.root_slots) == 1:
            return depths + self.root_slots[0].shape[0]
        trees = self.tree.tree_ids()
        return depths + self.root_lengths()[trees if self.queries is None else trees[self.queries]]
