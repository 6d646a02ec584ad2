"""The one switch between the paths of a kernel: Triton on CUDA, torch elsewhere.

Triton is imported inside the functions: it is not installed where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from recserve.kernels import accept_reference, reference, trie_children
from recserve.kernels.accept_reference import Keys, Walk
from recserve.kernels.cpu_attention import CpuTreeAttention
from recserve.kernels.paged_kv import RootTable, TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation, HeadTopK
from recserve.kernels.tree import TokenTree
from recserve.kernels.trie import Trie
from recserve.kernels.trie_children import BestChildren, LeafBits

LayerAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def tree_attention(batch: TreeBatch, activation: Activation = SOFTMAX) -> LayerAttention:
    """Attention of one batch, to be called once per layer as (query, key, value, keys, values).

    query [Tq, H, D], key and value [Tq, K, D] of the computed nodes, keys and values [slots, K, D]
    of the pool with the computed nodes already written -> [Tq, H, D]. The planned CPU path on a
    CPU, the Triton kernel on CUDA. For training: `reference.tree_attention`, which has gradients.
    Where the roots are a table a CPU has the reference alone.
    """
    if not batch.slots.is_cuda:
        if isinstance(batch.root_slots, RootTable):
            return lambda query, key, value, keys, values: reference.padded_tree_attention(
                query, keys, values, batch
            )
        return CpuTreeAttention(batch, activation)
    from recserve.kernels.tree_attention import TritonTreeAttention

    return TritonTreeAttention(batch, activation)


def accept(
    logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor, max_depth: int
) -> Walk:
    """`accept_reference.accept`."""
    if not logits.is_cuda:
        return accept_reference.accept(logits, tree, keys, temperatures, max_depth)
    from recserve.kernels import accept as kernel

    return kernel.accept(logits, tree, keys, temperatures, max_depth)


def accept_drawn(p: Tensor, q: Tensor, tree: TokenTree, keys: Keys, max_depth: int) -> Walk:
    """`accept_reference.accept_drawn`."""
    if not p.is_cuda:
        return accept_reference.accept_drawn(p, q, tree, keys, max_depth)
    from recserve.kernels import accept as kernel

    return kernel.accept_drawn(p, q, tree, keys, max_depth)


def move_paths(
    keys: Tensor, values: Tensor, sources: Tensor, targets: Tensor, lengths: Tensor
) -> None:
    """`reference.move_paths`."""
    if not keys.is_cuda:
        return reference.move_paths(keys, values, sources, targets, lengths)
    from recserve.kernels import path_move

    return path_move.move_paths(keys, values, sources, targets, lengths)


def rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """`reference.rope_write`."""
    if not qkv.is_cuda:
        return reference.rope_write(qkv, cos, sin, slots, keys, values)
    from recserve.kernels import rope_write as kernel

    return kernel.rope_write(qkv, cos, sin, slots, keys, values)


def grouped_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.grouped_rms_norm`."""
    if not x.is_cuda:
        return reference.grouped_rms_norm(x, weight, eps)
    from recserve.kernels import grouped_rms_norm as kernel

    return kernel.grouped_rms_norm(x, weight, eps)


def head_topk(hidden: Tensor, weight: Tensor, k: int) -> HeadTopK:
    """`reference.head_topk`."""
    if not hidden.is_cuda:
        return reference.head_topk(hidden, weight, k)
    from recserve.kernels import head_topk as kernel

    return kernel.head_topk(hidden, weight, k)


def best_children(
    trie: Trie,
    nodes: Tensor,
    log_probs: Tensor,
    logits: Tensor,
    width: int,
    keep: int,
    normalizers: Tensor | None = None,
    excluded: Tensor | None = None,
    allowed: LeafBits | None = None,
) -> BestChildren:
    """`trie_children.best_children`."""
    arguments = (trie, nodes, log_probs, logits, width, keep, normalizers, excluded, allowed)
    if not nodes.is_cuda:
        return trie_children.best_children(*arguments)
    from recserve.kernels import trie_topk

    return trie_topk.best_children(*arguments)
