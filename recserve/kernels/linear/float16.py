"""Weights of float32 that are stored in float16 without loss.

A step of one row costs what reading the weights costs. Weights of a float16 checkpoint are half as
many bytes as in float32, and the sums have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.linear.formats import Codec


def encode(weight: Tensor) -> Tensor:
    """Returns a weight [n, m] in float16."""
    return weight.detach().half()


def decode(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight [n, m] in a float type; exact in float32."""
    return weight.to(dtype)


FLOAT16 = Codec(encode, decode, c="recserve.kernels.linear.float16_panels:Float16Panels")
