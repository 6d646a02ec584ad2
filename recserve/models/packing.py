"""Weights laid out as the processor's matrix products read them, for serving on a CPU.

A product of few rows with a plain matrix repacks the matrix on every call, and is then bound by
that and not by memory. Packed once, a row costs what reading the weights costs. The products are
those of `kernels/native.py`, whose rows do not know how many there are, or oneDNN's, where a single
row has an arithmetic of its own over long sums, which `keep_rows_alike` forgoes
(`tests/models/test_packing.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recserve.kernels import dispatch
from recserve.kernels.native import LANES, TYPES, Panels
from recserve.kernels.native_layers import LayerShape, LayerWeights, NativeLayers
from recserve.models.decoder import Decoder, DecoderLayer
from recserve.models.language_model import LanguageModel
from recserve.models.silu import Silu

ROWS = 64  # the layout for so many rows is as fast for one, and the same arithmetic for all


class _OneDnn:
    """x W^T + b by oneDNN, W in its own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = _onednn()._reorder_linear_weight(weight, ROWS), bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = _onednn()._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


class PackedLinear(nn.Module):
    """nn.Linear for inference: x W^T + b, W as the quickest product of this machine reads it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [n, m], bias [n], on the CPU in one of TYPES."""
        super().__init__()
        self.never_alone = False
        bias = None if bias is None else bias.detach()
        kind = Panels.of if dispatch.packs(weight) else _OneDnn
        self._product: Panels | _OneDnn = kind(weight.detach(), bias)

    @property
    def panels(self) -> Panels | None:
        """What it multiplies by, if that is done in C."""
        return self._product if isinstance(self._product, Panels) else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., m] -> [..., n]. never_alone: oneDNN computes a single row twice."""
        alone = self.never_alone and x.numel() == x.shape[-1]
        if alone and isinstance(self._product, _OneDnn):
            return self._product(x.reshape(1, -1).repeat(2, 1))[:1].view(*x.shape[:-1], -1)
        return self._product(x)


def packable(weight: Tensor) -> bool:
    """Whether this machine has products of packed weights for it."""
    if weight.device.type != "cpu" or weight.dtype not in TYPES:
        return False
    if dispatch.packs(weight):
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype != torch.bfloat16 or bool(_onednn()._is_mkldnn_bf16_supported())


@torch.no_grad()
def pack_weights(model: nn.Module) -> None:
    """Replace every linear layer, and the head of a language model whose head is its embedding,
    by its packed form, in place; what this machine cannot pack stays.

    A packed model answers, but neither trains nor is saved nor moves to another device.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and packable(child.weight):
                setattr(module, name, PackedLinear(child.weight, child.bias))
    if isinstance(model, LanguageModel) and model.head is None and packable(model.tokens.weight):
        model.head = PackedLinear(model.tokens.weight)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.together = _together(module)


def _together(decoder: Decoder) -> NativeLayers | None:
    """Its layers in one call, if every weight is in panels and of one type."""
    c = decoder.config
    if c.head_dim % (2 * LANES):
        return None
    layers = []
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        linears = layer.qkv, layer.output, layer.gate_up, layer.down
        panels = [x.panels for x in linears if isinstance(x, PackedLinear) and x.panels is not None]
        norms = [layer.attention_norm.weight, layer.mlp_norm.weight]
        heads = [layer.q_norm.weight, layer.k_norm.weight] if c.qk_norm else [None, None]
        types = {p.weight.dtype for p in panels} | {n.dtype for n in (*norms, decoder.norm.weight)}
        if len(panels) < len(linears) or len(types) > 1:
            return None
        qkv, output, gate_up, down = panels
        norm, query, key = norms[0], heads[0], heads[1]
        layers.append(LayerWeights(norm, query, key, norms[1], qkv, output, gate_up, down))
    shape = LayerShape(
        c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, c.norm_eps
    )
    return NativeLayers(layers, decoder.norm.weight, shape)


def pack_layers(model: nn.Module, *names: str) -> None:
    """`pack_weights` of linear layers that are attributes of the model, by name; those it has."""
    for name in names:
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and packable(layer.weight):
            setattr(model, name, PackedLinear(layer.weight, layer.bias))


def keep_rows_alike(model: nn.Module) -> None:
    """A row's bits are the same alone and among others from now on, in packed layers and SiLU."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.never_alone = True
        elif isinstance(module, Silu):
            module.placeless = True


def _onednn() -> Any:
    return torch.ops.mkldnn
