"""Who attends: C or torch on a CPU, Triton on CUDA; prepared once for a forward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from recserve.kernels import backend
from recserve.kernels.attention import reference
from recserve.kernels.attention.cpu import CpuTreeAttention
from recserve.kernels.attention.reference import SOFTMAX, Activation
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.tree_batch import PrefixTable, TreeBatch

LayerAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BatchAttention = Callable[[TreeBatch, Activation], LayerAttention]


def tree_attention(batch: TreeBatch, activation: Activation = SOFTMAX) -> LayerAttention:
    """Prepares the attention of one batch; the result is called once per layer.

    A CPU attends in C or in torch, and CUDA in Triton. Training uses `reference.tree_attention`,
    which has gradients. A CPU computes roots given as a table with the reference.

    Args:
        batch: Trees of one forward pass.
        activation: Softmax, or SiLU with a constant normaliser.

    Returns:
        A function (query, key, value, keys, values) -> [Tq, H, D]. query [Tq, H, D], key and value
        [Tq, K, D] belong to the computed nodes. keys and values [slots, K, D] are one layer of the
        pool, with the computed nodes already written.
    """
    if backend_of(batch.slots) is Backend.TRITON:
        from recserve.kernels.attention.triton_attention import TritonTreeAttention

        return TritonTreeAttention(batch, activation)
    if isinstance(batch.prefix_slots, PrefixTable):
        return lambda query, key, value, keys, values: reference.padded_tree_attention(
            query, keys, values, batch
        )
    if not batch.slots.is_cuda:
        return CpuTreeAttention(batch, activation, native=backend.c_is_allowed())

    def plain(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return reference.tree_attention(query, keys, values, batch, activation)

    return plain
