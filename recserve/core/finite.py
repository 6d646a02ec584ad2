"""Detection of model outputs that are not finite, and isolation of their requests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NotFinite(ArithmeticError):
    """The model computed NaN or infinity for this request, so the request has no result."""

    def __init__(self) -> None:
        super().__init__("the model's output for this request is not finite (NaN or infinity)")


def all_finite(states: Tensor) -> bool:
    """Returns whether every number is finite.

    The check is one sum. The host reads the sum, so this function is for states on a CPU. On other
    devices, `nonfinite_flags` leaves the flag on the device until results are read.
    """
    return math.isfinite(states.sum(dtype=torch.float32).item())


def nonfinite_flags(states: Tensor) -> Tensor:
    """Returns [n] float32: 0 for each finite state of states [n, ...], NaN for each of the others.

    Flaws of several states of a request can be added: the sum is NaN if one of them is.
    """
    return states.flatten(1).sum(1, dtype=torch.float32) * 0.0


def without_nonfinite(states: Tensor, nonfinite: Tensor) -> Tensor:
    """Returns states [n, E] with zeros in the rows whose flag [n] is NaN.

    Every comparison with NaN is false, so one such state would keep the search of a whole batch
    from ending. A nonfinite request is searched with zeros, and an error replaces its result.
    """
    return torch.where((nonfinite == 0)[:, None], states, 0.0)
