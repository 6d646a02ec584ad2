"""Weights in 8 bits: whole numbers from -127 to 127 and one scale per output.

A row of a weight matrix is rounded to multiples of its largest number divided by 127. Activations
keep their type. The rounding of a weight depends on its own row alone.
Source: LLM.int8(), arXiv 2208.07339, section 2 (symmetric "absmax" rounding), with a scale per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.linear.formats import Codec
from recserve.kernels.linear.panels import Panels, c_multiplies

LARGEST = 127


@dataclass(frozen=True)
class Int8Weight:
    """A weight matrix, W[i] = scales[i] * values[i].

    Attributes:
        values: [n, m] int8, from -127 to 127.
        scales: [n] float32. A row of zeros has the scale 0.
    """

    values: Tensor
    scales: Tensor

    @staticmethod
    def of(weight: Tensor) -> Int8Weight:
        """Rounds a weight [n, m] of any float type to nearest, ties to even."""
        wide = weight.detach().float()
        scales = wide.abs().amax(1) / LARGEST
        steps = wide / torch.where(scales > 0, scales, 1.0)[:, None]
        values = steps.round().clamp(-LARGEST, LARGEST).to(torch.int8)
        return Int8Weight(values, scales)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [n, m] in a float type."""
        return (self.values * self.scales[:, None]).to(dtype)


def panels(weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Panels:
    """Packs a weight [n, m] and a bias [n] for activations of a type of `TYPES`."""
    return Panels.of(weight.values, bias, dtype, weight.scales)


INT8 = Codec(
    Int8Weight.of,
    Int8Weight.dequantize,
    panels,
    c_multiplies,
    triton="recserve.kernels.linear.triton_int8:TritonInt8Product",
)
