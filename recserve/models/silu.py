"""SiLU, x sigmoid(x), whose bits may be made independent of where in a tensor an element stands.

The library computes what is left after whole vectors, at the end of a row or of a thread's share,
by other instructions than the rest, and the last bit differs; its exp and division do not.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recserve.kernels import dispatch


class Silu(nn.Module):
    """placeless: composed of exp and a division, in float32; slower."""

    def __init__(self) -> None:
        super().__init__()
        self.placeless = False

    def forward(self, x: Tensor) -> Tensor:
        """Any shape and float dtype; the same back."""
        if not self.placeless:
            return F.silu(x)
        wide = x.float()
        return (wide / ((-wide).exp_() + 1.0)).to(x.dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [..., 2 n], gate first -> [..., n]."""
        if not self.placeless or dispatch.in_native(gate_up):  # which has no places
            return dispatch.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = self(gate) * up
        return product
