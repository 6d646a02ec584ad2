"""The operators of serving, each with its reference and its kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from recserve.kernels import accept_reference, backend, reference
from recserve.kernels.backend import Backend, Operator, backend_of
from recserve.kernels.cpu import native
from recserve.kernels.cpu.cpu_attention import CpuTreeAttention
from recserve.kernels.paged_kv import PrefixTable, TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation

LayerAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BatchAttention = Callable[[TreeBatch, Activation], LayerAttention]
TRITON = "recserve.kernels.triton"


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
        from recserve.kernels.triton.tree_attention import TritonTreeAttention

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


accept = Operator(accept_reference.accept, triton=f"{TRITON}.accept:accept")
accept_drawn = Operator(accept_reference.accept_drawn, triton=f"{TRITON}.accept_drawn:accept_drawn")
move_paths = Operator(reference.move_paths, triton=f"{TRITON}.path_move:move_paths")
head_topk = Operator(reference.head_topk, triton=f"{TRITON}.head_topk:head_topk")


rope_write = Operator(
    reference.rope_write,
    native.rope_write,
    lambda qkv, cos, sin, slots, keys, values, norms=None: (
        qkv.dtype == keys.dtype and qkv.shape[-1] % (2 * native.LANES) == 0
    ),
    triton=f"{TRITON}.rope_write:rope_write",
)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension, in x's dtype.

    Args:
        x: [..., E].
        weight: [E].
        eps: Added to the mean square.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


rms_norm = Operator(_rms_norm, native.rms_norm, lambda x, weight, eps: weight.dtype == x.dtype)


def _add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + y, and its RMSNorm, both [..., E] in x's dtype.

    Args:
        x: [..., E].
        y: [..., E] in x's dtype.
        weight: [E].
        eps: Added to the mean square.
    """
    total = x + y
    return total, rms_norm(total, weight, eps)


add_rms_norm = Operator(_add_rms_norm, triton=f"{TRITON}.layer_norm:add_rms_norm", trains=True)


def _silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [..., n] of a tensor [..., 2 n] that holds the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


silu_mul = Operator(_silu_mul, native.silu_mul, triton=f"{TRITON}.layer_norm:silu_mul", trains=True)
