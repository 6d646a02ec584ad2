"""Numbers of the host on their way to the device.

A plain copy waits until the device has done all work before it. One that need not be waited for is
staged by the driver before the call returns, so what it was made from may change at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(
    values: Sequence[int] | Sequence[float] | np.ndarray | Tensor,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The values as a tensor there, of the given dtype or their own; the host does not wait."""
    return torch.as_tensor(values).to(device, dtype, non_blocking=True)
