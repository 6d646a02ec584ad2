"""Model outputs that are not finite: how they are found, and kept apart from other requests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NotFinite(ArithmeticError):
    """The model computed NaN or infinity for this request, so there is no answer to it."""

    def __init__(self) -> None:
        super().__init__("the model's output for this request is not finite (NaN or infinity)")


def all_finite(states: Tensor) -> bool:
    """Returns whether no number is NaN or infinite, by one sum.

    The host reads the sum, so this is for states on a CPU; elsewhere `flaws_of` leaves the flag on
    the device until results are read.
    """
    return math.isfinite(states.sum(dtype=torch.float32).item())


def flaws_of(states: Tensor) -> Tensor:
    """Returns [n] float32: 0 for each of n states [n, ...] that is finite, NaN for the others.

    Flaws of several states of a request are added: the sum is NaN if one of them is.
    """
    return states.flatten(1).sum(1, dtype=torch.float32) * 0.0


def without_flaws(states: Tensor, flaws: Tensor) -> Tensor:
    """Returns states [n, E] with zeros in place of the rows whose flaw [n] is NaN.

    NaN compares as false with everything: a search would go on for all requests of a batch because
    of one. A flawed request is searched with zeros, and its answer is replaced by an error.
    """
    return torch.where((flaws == 0)[:, None], states, 0.0)
