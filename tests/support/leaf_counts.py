"""Counts of allowed leaves, computed from the fields of a filter."""

from torch import Tensor, zeros_like

from recserve.kernels.trie.trie import LeafFilter, Leaves, count_in_ranges


def remaining(found: LeafFilter, trie, nodes: Tensor) -> Tensor:
    """Returns the number of allowed leaves under each node [n]."""
    leaves = trie.leaves(nodes)
    left = leaves.last - leaves.first if found.all else zeros_like(nodes)
    if found.bits is not None:
        base = trie.built_leaves(nodes)
        left = left + found.bits.within(Leaves(base.first[None], base.last[None]))[0]
    if found.added is not None:
        left = left + count_in_ranges(found.added, leaves)
    for ranks in found.excluded:
        left = left - count_in_ranges(ranks, leaves)
    return left
