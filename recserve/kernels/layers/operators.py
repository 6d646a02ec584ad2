"""The operators of a decoder layer beside its products and its attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.backend import Operator
from recserve.kernels.layers import native, reference
from recserve.kernels.native.native import LANES

TRITON = "recserve.kernels.layers"


rope_write = Operator(
    reference.rope_write,
    native.rope_write,
    lambda qkv, cos, sin, slots, keys, values, norms=None: (
        qkv.dtype == keys.dtype and qkv.shape[-1] % (2 * LANES) == 0
    ),
    triton=f"{TRITON}.triton_rope_write:rope_write",
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


add_rms_norm = Operator(_add_rms_norm, triton=f"{TRITON}.triton_norms:add_rms_norm", trains=True)


def _silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [..., n] of a tensor [..., 2 n] that holds the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


silu_mul = Operator(
    _silu_mul, native.silu_mul, triton=f"{TRITON}.triton_norms:silu_mul", trains=True
)
