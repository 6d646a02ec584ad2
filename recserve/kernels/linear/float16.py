"""Weights of float32 that are stored in float16 without loss.

A step of one row costs what reading the weights costs. Weights of a float16 checkpoint are half as
many bytes as in float32, and the sums have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.linear.formats import Codec
from recserve.kernels.linear.panels import Panels, c_multiplies


def encode(weight: Tensor) -> Tensor:
    """Returns a weight [n, m] in float16."""
    return weight.detach().half()


def decode(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight [n, m] in a float type; exact in float32."""
    return weight.to(dtype)


def c_supports(weight: Tensor) -> bool:
    """Returns whether C multiplies in place of a weight [n, m]: float32, exact in float16."""
    if weight.dtype != torch.float32 or not c_multiplies(weight):
        return False
    half = weight.half()
    return bool(half.isfinite().all()) and torch.equal(half.float(), weight)


FLOAT16 = Codec(encode, decode, Panels.of, c_supports)
