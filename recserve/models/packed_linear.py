"""Linear layers whose weights lie the way the CPU's matrix product reads them.

A plain weight is rearranged by oneDNN inside every product; with few rows, which is what decoding
has, that costs more than the product. Arranged once, a product of 1 to 16 rows takes half the time
in bfloat16 and about two thirds in float32, and no number of rows takes longer. For serving only:
such a weight cannot be trained or saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """x W^T + b with W in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out]: float32 or bfloat16, on a CPU; `can_pack` says if."""
        super().__init__()
        with torch.inference_mode(False), torch.no_grad():
            # The row count is what the layout is chosen for; it serves any other as well.
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().clone(), 1)
        self._weight, self._bias = packed, None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether this build, processor and weight have such a layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer under `model` that can be packed; the others stay."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and can_pack(layer.weight):
                setattr(parent, name, PackedLinear(layer.weight, layer.bias))
