"""The one switch between the paths of a kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from recserve.kernels.cpu_attention import CpuTreeAttention
from recserve.kernels.paged_kv import TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation

LayerAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def tree_attention(batch: TreeBatch, activation: Activation = SOFTMAX) -> LayerAttention:
    """Attention of one batch, to be called once per layer as (query, key, value, keys, values).

    query [Tq, H, D], key and value [Tq, K, D] of the computed nodes, keys and values [slots, K, D]
    of the pool with the computed nodes already written -> [Tq, H, D]. The planned CPU path on a
    CPU, the Triton kernel on CUDA.
    """
    if batch.slots.device.type == "cpu":
        return CpuTreeAttention(batch, activation)
    # Imported here: Triton is not installed where there is no GPU.
    from recserve.kernels.tree_attention import TritonTreeAttention

    return TritonTreeAttention(batch, activation)
