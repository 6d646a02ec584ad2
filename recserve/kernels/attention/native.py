"""Tree attention on a CPU in C, without gathers or masks (attention.c)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.attention.reference import SOFTMAX, Activation
from recserve.kernels.native.native import LANES, TYPES, N, P, compiled, library
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import PrefixTable, TreeBatch

AT_ONCE = 128  # rows that attend together; MOST_ROWS of attention.c
MOST = torch.iinfo(torch.int64).max
MOST_NUMBERS = 2**16  # numbers of the queries that attend together, which lie on the stack
PARALLEL = 2**15  # from so many scores of all heads on, threads share a call


class _Tree(ctypes.Structure):
    """`Tree` of functions.h."""

    _fields_ = [
        ("root", P),
        ("root_length", N),
        ("slots", P),
        ("ends", P),
        ("first", N),
        ("nodes", N),
        ("queries", P),
        ("limits", P),
        ("row", N),
        ("count", N),
    ]


@dataclass(frozen=True)
class HeadLayout:
    """Heads of a model, as far as attention in C depends on them.

    Attributes:
        kv_heads: K.
        group: G, query heads per KV head.
        dim: D, head dimension.
        dtype: Type of queries and keys.
    """

    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype

    def in_c(self) -> bool:
        """Returns whether C attends with these heads."""
        if self.dtype not in TYPES or self.dim % LANES or library() is None:
            return False
        return max(self.group, AT_ONCE) * self.dim <= MOST_NUMBERS


class NativeTreeAttention:
    """Attention of one batch, called once per layer."""

    def __init__(self, batch: TreeBatch, activation: Activation = SOFTMAX) -> None:
        """Collects the addresses of the trees.

        Args:
            batch: Trees of one forward pass; root slots as a tuple.
            activation: Softmax, or SiLU with a constant normaliser.
        """
        assert not isinstance(batch.prefix_slots, PrefixTable)
        self._normalizer = activation.normalizer or 0.0
        tree, queries = batch.tree, batch.queries
        slots, ends = _dense(batch.slots), _dense(tree.ends)
        offsets = tree.offsets.tolist()
        roots = [_dense(root) for root in batch.prefix_slots]
        shared = [0] * len(roots)
        if tree.shared is not None:  # nodes that the whole tree sees are part of its root
            shared = tree.shared.tolist()
            roots = [
                torch.cat([root, slots[first : first + count]]) if count else root
                for root, first, count in zip(roots, offsets[:-1], shared, strict=True)
            ]
            queries = torch.arange(tree.num_nodes) if queries is None else queries
        counts = _counts(batch) if batch.counts is None else batch.counts
        queries = None if queries is None else _dense(queries)
        limits = _limits(tree)
        # C reads these by address, so they must live as long as this object
        self._read = slots, ends, queries, limits, roots
        self._trees = (_Tree * len(counts))()
        self._scores = row = 0
        for b, (root, count) in enumerate(zip(roots, counts, strict=True)):
            first = offsets[b] + shared[b]
            nodes = offsets[b + 1] - first
            self._trees[b] = _Tree(
                root.data_ptr(),
                root.shape[0],
                _place(slots, first),
                _place(ends, first),
                first,
                nodes,
                None if queries is None else _place(queries, row),
                None if limits is None else limits.data_ptr(),
                row,
                count,
            )
            row += count
            self._scores += count * (root.shape[0] + nodes)

    @property
    def address(self) -> int:
        """Address of the tree structs."""
        return ctypes.addressof(self._trees)

    @property
    def num_trees(self) -> int:
        """B, the number of trees."""
        return len(self._trees)

    def together(self, heads: int) -> bool:
        """Returns whether a call is large enough for several threads."""
        return self._scores * heads >= PARALLEL

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attends as `attention.tree_attention`; key and value are read from the pool."""
        heads, (kv_heads, dim) = query.shape[1], keys.shape[1:]
        query = query.contiguous()
        out = torch.empty_like(query)
        compiled().tree_attention(
            TYPES[query.dtype],
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            self.address,
            self.num_trees,
            heads,
            kv_heads,
            dim,
            dim**-0.5,
            self._normalizer,
            self.together(heads),
        )
        return out


def _counts(batch: TreeBatch) -> list[int]:
    """Returns the number of computed nodes of each tree."""
    bounds = batch.tree.offsets
    if batch.queries is not None:
        bounds = torch.searchsorted(batch.queries, bounds)
    counts: list[int] = bounds.diff().tolist()
    return counts


def supports(batch: TreeBatch) -> bool:
    """Returns whether C attends to these trees: not to prefixes in a table.

    Shared nodes become part of the root in C. So nodes of such a tree may not see a part of it.
    """
    tree = batch.tree
    if isinstance(batch.prefix_slots, PrefixTable):
        return False
    if tree.prefix_limits is None or tree.shared is None:
        return True
    trees = tree.tree_ids()
    limited = tree.prefix_limits < batch.root_lengths()[trees]
    return not bool((limited & (tree.shared[trees] > 0)).any())


def _limits(tree: TokenTree) -> Tensor | None:
    """Returns the root tokens that each node sees. Nodes of a tree with shared nodes see all."""
    limits = tree.prefix_limits
    if limits is None or tree.shared is None:
        return None if limits is None else _dense(limits)
    return _dense(limits).masked_fill(tree.shared[tree.tree_ids()] > 0, MOST)


def _dense(column: Tensor) -> Tensor:
    return column.to(torch.int64).contiguous()


def _place(column: Tensor, index: int) -> int:
    """Returns the address of an element of an int64 column."""
    return column.data_ptr() + 8 * index
