"""Tree attention on a CPU in C: nothing is planned, gathered or masked beforehand.

cpu_attention.py decides which batches are attended to here.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from recserve.kernels.cpu.cpu_plan import Form
from recserve.kernels.cpu.native import LANES, TYPES, N, P, compiled, library
from recserve.kernels.paged_kv import RootTable, TreeBatch

AT_ONCE = 128  # rows; MOST_ROWS of attention.c
MOST_NUMBERS = 2**16  # of the queries that attend at once, which lie on the stack
PARALLEL = 2**15  # scores of all heads from which threads share a call


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
        """counts: rows of each tree."""
        assert not isinstance(batch.root_slots, RootTable)
        slots, ends = _dense(batch.slots), _dense(batch.tree.ends)
        queries = None if batch.queries is None else _dense(batch.queries)
        roots = [_dense(root) for root in batch.root_slots]
        self._read = slots, ends, queries, roots  # by address: kept as long as this is
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
        """None where it cannot attend."""
        tree = batch.tree
        if not form.softmax or form.dtype not in TYPES or form.dim % LANES or library() is None:
            return None
        if tree.root_limits is not None or tree.shared is not None:
            return None
        if isinstance(batch.root_slots, RootTable):
            return None
        if max(form.group, AT_ONCE) * form.dim > MOST_NUMBERS:
            return None
        return NativeTreeAttention(batch, _counts(batch) if batch.counts is None else batch.counts)

    @property
    def address(self) -> int:
        """Of the trees."""
        return ctypes.addressof(self._trees)

    @property
    def num_trees(self) -> int:
        """B."""
        return len(self._trees)

    def together(self, heads: int) -> bool:
        """Whether threads share a call."""
        return self._scores * heads >= PARALLEL

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """As `dispatch.tree_attention`'s; key and value are read from the pool."""
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


def _counts(batch: TreeBatch) -> list[int]:
    """Computed nodes of each tree."""
    bounds = batch.tree.offsets
    if batch.queries is not None:
        bounds = torch.searchsorted(batch.queries, bounds)
    counts: list[int] = bounds.diff().tolist()
    return counts


def _dense(column: Tensor) -> Tensor:
    return column.to(torch.int64).contiguous()


def _place(column: Tensor, index: int) -> int:
    """Address of an element of an int64 column."""
    return column.data_ptr() + 8 * index
