"""The operator of tree attention, which is prepared once for a forward pass.

Triton reads any pool on a device. On a CPU, C attends where it supports the heads and the trees,
and torch elsewhere; both read a decoded copy of an FP8 pool. In a captured step, shapes are fixed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from recserve.kernels.attention import reference
from recserve.kernels.attention.cpu import CpuTreeAttention
from recserve.kernels.attention.fp8 import DecodedAttention
from recserve.kernels.attention.native import NativeTreeAttention, supports, supports_heads
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.backend import Operator
from recserve.kernels.tree_batch import TreeBatch

LayerAttention = Callable[..., Tensor]
BatchAttention = Callable[[TreeBatch, HeadLayout, Activation], LayerAttention]


def _in_torch(
    batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX
) -> LayerAttention:
    """Prepares the attention of one batch; the result is called once per layer.

    Training uses `reference.tree_attention`, which has gradients.

    Args:
        batch: Trees of one forward pass.
        heads: Heads of queries and keys.
        activation: Softmax, or SiLU with a constant normaliser.

    Returns:
        A function (query, key, value, keys, values) -> [Tq, H, D]. query [Tq, H, D], key and value
        [Tq, K, D] belong to the computed nodes. keys and values [slots, K, D] are one layer of the
        pool, with the computed nodes already written.
    """
    if batch.fixed_shapes:
        return lambda query, key, value, keys, values: reference.padded_tree_attention(
            query, keys, values, batch
        )
    if heads.fp8:
        return DecodedAttention(batch, heads, activation, tree_attention)
    if not batch.slots.is_cuda:
        return CpuTreeAttention(batch, heads, activation)
    return lambda query, key, value, keys, values: reference.tree_attention(
        query, keys, values, batch, activation
    )


def _in_c(batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX) -> LayerAttention:
    return NativeTreeAttention(batch, activation)


def _c_supports(batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX) -> bool:
    return supports_heads(heads) and supports(batch)


def _reads(batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX) -> Tensor:
    return batch.slots


tree_attention = Operator(
    _in_torch,
    _in_c,
    _c_supports,
    triton="recserve.kernels.attention.triton_attention:TritonTreeAttention",
    reads=_reads,
)
