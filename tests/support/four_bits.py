"""A format of weights that is not in the package: whole numbers from -7 to 7, one scale per row."""

import torch
from torch import Tensor

from recserve.kernels.linear.formats import Codec, WeightFormat


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight [n, m] to multiples of a seventh of each row's largest number."""
    scales = weight.float().abs().amax(1, keepdim=True) / 7
    return (weight / scales).round().to(torch.int8), scales


def decode(encoded: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the weight in a float type."""
    values, scales = encoded
    return (values * scales).to(dtype)


CODEC = Codec(encode, decode)
FOUR_BITS = WeightFormat(4, "tests.support.four_bits:CODEC")
