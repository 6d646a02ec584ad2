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
from recserve.kernels.backend import Backend, Operator, backend_of
from recserve.kernels.tree_batch import TreeBatch

LayerAttention = Callable[..., Tensor]
BatchAttention = Callable[[TreeBatch, HeadLayout, Activation], LayerAttention]


def _in_torch(
    batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX
) -> LayerAttention:
    if batch.slots.is_cpu and not batch.fixed_shapes:
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


_attend = Operator(
    _in_torch,
    _in_c,
    _c_supports,
    triton="recserve.kernels.attention.triton_attention:TritonTreeAttention",
    reads=_reads,
)


def tree_attention(
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
    decoded = heads.fp8 and not batch.fixed_shapes
    if decoded and backend_of(batch.slots) is not Backend.TRITON:
        return DecodedAttention(batch, heads, activation, _attend)
    return _attend(batch, heads, activation)
