"""Tree attention on a CPU in C, without gathers or masks (attention.c)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.native.native import LANES, TYPES, N, P, get_library, library
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import Prefixes, TreeBatch

AT_ONCE = 128  # rows that attend together; MOST_ROWS of attention.c
MOST = torch.iinfo(torch.int64).max
MOST_NUMBERS = 2**16  # numbers of the queries that attend together, which lie on the stack
PARALLEL = 2**15  # from so many scores of all heads on, threads share a call


class _Tree(ctypes.Structure):
    """`Tree` of functions.h."""

    _fields_ = [
        ("prefix", P),
        ("prefix_length", N),
        ("slots", P),
        ("ends", P),
        ("first", N),
        ("nodes", N),
        ("queries", P),
        ("limits", P),
        ("row", N),
        ("count", N),
    ]


def supports_heads(heads: HeadLayout) -> bool:
    """Returns whether C attends with these heads."""
    if heads.fp8 or heads.dtype not in TYPES or heads.dim % LANES or library() is None:
        return False
    return max(heads.group, AT_ONCE) * heads.dim <= MOST_NUMBERS


class NativeTreeAttention:
    """Attention of one batch, called once per layer."""

    def __init__(self, batch: TreeBatch, activation: Activation = SOFTMAX) -> None:
        """Collects the addresses of the trees.

        Args:
            batch: Trees of one forward pass.
            activation: Softmax, or SiLU with a constant normaliser.
        """
        self._normalizer = activation.normalizer or 0.0
        tree, queries, prefixes = batch.tree, batch.queries, batch.prefixes
        slots, ends = _dense(batch.slots), _dense(tree.ends)
        offsets, shared = tree.offsets.tolist(), [0] * len(prefixes)
        if tree.shared is not None:  # nodes that the whole tree sees are part of its prefix
            shared = tree.shared.tolist()
            prefixes = Prefixes.of(
                [
                    torch.cat([prefix, slots[first : first + count]])
                    for prefix, first, count in zip(prefixes, offsets[:-1], shared, strict=True)
                ]
            )
            queries = torch.arange(tree.num_nodes) if queries is None else queries
        counts = _counts(batch) if batch.counts is None else batch.counts
        queries = None if queries is None else _dense(queries)
        limits, table = _limits(tree), _dense(prefixes.slots)
        # C reads these by address, so they must live as long as this object
        self._read = slots, ends, queries, limits, table
        self._trees = (_Tree * len(counts))()
        self._scores = row = 0
        assert prefixes.places is not None
        starts, lengths = prefixes.places
        for b, count in enumerate(counts):
            first = offsets[b] + shared[b]
            nodes = offsets[b + 1] - first
            self._trees[b] = _Tree(
                _place(table, starts[b]),
                lengths[b],
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
            self._scores += count * (lengths[b] + nodes)

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
        get_library().tree_attention(
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


def in_c(attention: object) -> NativeTreeAttention | None:
    """Returns a prepared attention if C attends, and other functions in C may do it, else None."""
    return attention if isinstance(attention, NativeTreeAttention) else None


def _counts(batch: TreeBatch) -> list[int]:
    """Returns the number of computed nodes of each tree."""
    bounds = batch.tree.offsets
    if batch.queries is not None:
        bounds = torch.searchsorted(batch.queries, bounds)
    counts: list[int] = bounds.diff().tolist()
    return counts


def supports(batch: TreeBatch) -> bool:
    """Returns whether C attends to these trees.

    It reads the lengths of prefixes on the host. Shared nodes become part of the prefix in C, so
    nodes of such a tree may not see a part of it.
    """
    tree = batch.tree
    if batch.fixed_shapes:
        return False
    if tree.prefix_limits is None or tree.shared is None:
        return True
    trees = tree.tree_ids()
    limited = tree.prefix_limits < batch.prefixes.lengths[trees]
    return not bool((limited & (tree.shared[trees] > 0)).any())


def _limits(tree: TokenTree) -> Tensor | None:
    """Returns the prefix tokens that each node sees. Nodes of a tree with shared nodes see all."""
    limits = tree.prefix_limits
    if limits is None or tree.shared is None:
        return None if limits is None else _dense(limits)
    return _dense(limits).masked_fill(tree.shared[tree.tree_ids()] > 0, MOST)


def _dense(column: Tensor) -> Tensor:
    return column.to(torch.int64).contiguous()


def _place(column: Tensor, index: int) -> int:
    """Returns the address of an element of an int64 column."""
    return column.data_ptr() + 8 * index
