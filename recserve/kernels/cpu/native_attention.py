"""Tree attention on a CPU in C, without plans, gathers or masks.

cpu_attention.py decides which batches use it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from recserve.kernels.cpu.cpu_plan import Form
from recserve.kernels.cpu.native import LANES, TYPES, N, P, compiled, library
from recserve.kernels.paged_kv import PrefixTable, TreeBatch

AT_ONCE = 128  # rows that attend together; MOST_ROWS of attention.c
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
        ("row", N),
        ("count", N),
    ]


class NativeTreeAttention:
    """Attention of one batch, called once per layer."""

    def __init__(self, batch: TreeBatch, counts: list[int]) -> None:
        """Collects the addresses of the trees.

        Args:
            batch: Trees of one forward pass; root slots as a tuple.
            counts: Computed nodes of each tree.
        """
        assert not isinstance(batch.prefix_slots, PrefixTable)
        slots, ends = _dense(batch.slots), _dense(batch.tree.ends)
        queries = None if batch.queries is None else _dense(batch.queries)
        roots = [_dense(root) for root in batch.prefix_slots]
        # C reads these by address, so they must live as long as this object
        self._read = slots, ends, queries, roots
        offsets = batch.tree.offsets.tolist()
        self._trees = (_Tree * len(counts))()
        self._scores = row = 0
        for b, (root, count) in enumerate(zip(roots, counts, strict=True)):
            first, nodes = offsets[b], offsets[b + 1] - offsets[b]
            self._trees[b] = _Tree(
                root.data_ptr(),
                root.shape[0],
                _place(slots, first),
                _place(ends, first),
                first,
                nodes,
                None if queries is None else _place(queries, row),
                row,
                count,
            )
            row += count
            self._scores += count * (root.shape[0] + nodes)

    @staticmethod
    def of(batch: TreeBatch, form: Form) -> NativeTreeAttention | None:
        """Returns the attention of a batch, or None where C does not support it."""
        tree = batch.tree
        if not attends(form):
            return None
        if tree.root_limits is not None or tree.shared is not None:
            return None
        if isinstance(batch.prefix_slots, PrefixTable):
            return None
        return NativeTreeAttention(batch, _counts(batch) if batch.counts is None else batch.counts)

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
        """Attends as `dispatch.tree_attention`; key and value are read from the pool."""
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
            self.together(heads),
        )
        return out


def attends(form: Form) -> bool:
    """Returns whether C attends with heads of this form, in trees that it supports."""
    if not form.softmax or form.dtype not in TYPES or form.dim % LANES or library() is None:
        return False
    return max(form.group, AT_ONCE) * form.dim <= MOST_NUMBERS


def _counts(batch: TreeBatch) -> list[int]:
    """Returns the number of computed nodes of each tree."""
    bounds = batch.tree.offsets
    if batch.queries is not None:
        bounds = torch.searchsorted(batch.queries, bounds)
    counts: list[int] = bounds.diff().tolist()
    return counts


def _dense(column: Tensor) -> Tensor:
    return column.to(torch.int64).contiguous()


def _place(column: Tensor, index: int) -> int:
    """Returns the address of an element of an int64 column."""
    return column.data_ptr() + 8 * index
