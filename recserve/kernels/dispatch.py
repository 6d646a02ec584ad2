"""The one switch between the paths of a kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from recserve.kernels import reference
from recserve.kernels.cpu_attention import CpuTreeAttention
from recserve.kernels.paged_kv import TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation

LayerAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def tree_attention(batch: TreeBatch, activation: Activation = SOFTMAX) -> LayerAttention:
    """Attention of one batch, to be called once per layer as (query, key, value, keys, values).

    query [Tq, H, D], key and value [Tq, K, D] of the computed nodes, keys and values [slots, K, D]
    of the pool with the computed nodes already written -> [Tq, H, D]. The planned CPU path on a
    CPU, the reference elsewhere.
    """
    if batch.slots.device.type == "cpu":
        return CpuTreeAttention(batch, activation)

    def call(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return reference.tree_attention(query, keys, values, batch, activation)

    return call
