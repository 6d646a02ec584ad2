"""Rotary positions: which angle each pair of a head's dimensions turns by."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from recserve.models.config import DecoderConfig


class Rope:
    """Cosines and sines of rotary positions, computed once per forward and shared by all layers.

    cos, sin [..., T, D/2] float32. Pairs are (d, d + D/2), the convention of Hugging Face's Llama.
    Source: arXiv 2104.09864.
    """

    def __init__(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> None:
        angles = positions[..., None].float() * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        self._dtype = dtype

    @cached_property
    def _turns(self) -> tuple[Tensor, Tensor]:
        cos, sin = (x[..., None, :].to(self._dtype) for x in (self.cos, self.sin))
        return cos, sin

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., T, H, D] -> the same shape, turned by its position."""
        cos, sin = self._turns
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """[D/2] float32 radians per position, on the CPU, whatever the defaults of torch are.

    Source of the scaling: Llama 3.1 (arXiv 2407.21783, section 3.4.2, and its published weights).
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    exponents = pairs / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
