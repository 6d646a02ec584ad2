"""Copies of host values to the device.

A plain copy waits until the device has finished all earlier work. For a non-blocking copy the
driver stages the data before the call returns, so the source may change immediately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(
    values: Sequence[float] | Sequence[Sequence[float]] | np.ndarray | Tensor,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copies values to a device without waiting for it.

    Args:
        values: Numbers, rows of numbers, an array or a tensor.
        device: Target device.
        dtype: Type of the result. None means the type of the values.
    """
    return torch.as_tensor(values).to(device, dtype, non_blocking=True)
