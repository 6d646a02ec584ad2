"""Weights laid out as the processor's matrix products read them, for serving on a CPU.

The products are those of `kernels/cpu/native.py`, whose rows do not know how many there are, or
oneDNN's, whichever is faster here. oneDNN has an arithmetic of its own for a single row over long
sums; `keep_rows_alike` turns that off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recserve.kernels import dispatch
from recserve.kernels.cpu import native
from recserve.kernels.cpu.choice import MARGIN
from recserve.kernels.cpu.native import LANES, Panels
from recserve.kernels.cpu.native_layers import LayerShape, LayerWeights, NativeLayers
from recserve.kernels.cpu.products import OneDnnWeight, onednn_packs
from recserve.models.config import DecoderConfig
from recserve.models.decoder import Decoder, DecoderLayer, Silu
from recserve.models.language_model import LanguageModel


class PackedLinear(nn.Module):
    """nn.Linear for inference: x W^T + b, W as the quickest product of this machine reads it."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, in_c: bool | None = None
    ) -> None:
        """Packs a weight [n, m] and a bias [n], of which `packable` is true.

        in_c: Whether the product runs in C; None measures it for this weight alone.
        """
        super().__init__()
        self.never_alone = False
        bias = None if bias is None else bias.detach()
        if in_c is None:
            in_c = dispatch.packs([weight])
        kind = Panels.of if in_c and native.multiplies(weight) else OneDnnWeight
        self._product: Panels | OneDnnWeight = kind(weight.detach(), bias)

    @property
    def panels(self) -> Panels | None:
        """What it multiplies by, if that is done in C."""
        return self._product if isinstance(self._product, Panels) else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., m] -> [..., n]. never_alone: oneDNN computes a single row twice."""
        alone = self.never_alone and x.numel() == x.shape[-1]
        if alone and isinstance(self._product, OneDnnWeight):
            return self._product(x.reshape(1, -1).repeat(2, 1))[:1].view(*x.shape[:-1], -1)
        return self._product(x)


def packable(weight: Tensor, in_c: bool | None = None) -> bool:
    """Whether this machine has products of packed weights for it; in_c as in PackedLinear."""
    if not weight.is_cpu:
        return False
    if in_c is None:
        in_c = dispatch.packs([weight])
    return onednn_packs(weight.dtype) or (in_c and native.multiplies(weight))


@torch.no_grad()
def pack_weights(model: nn.Module) -> None:
    """Replaces every linear layer by its packed form, in place.

    So is the head of a language model whose head is its embedding. What this machine cannot pack
    stays. All products of a model run in C or none does, because a decoder whose products are all
    in C runs in one call. A packed model answers, but neither trains nor is saved nor moves to
    another device.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    tied = model.tokens if isinstance(model, LanguageModel) and model.head is None else None
    weights = [linear.weight for linear in linears] + ([] if tied is None else [tied.weight])
    in_c = dispatch.packs([weight for weight in weights if native.multiplies(weight)])
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and packable(child.weight, in_c):
                setattr(module, name, PackedLinear(child.weight, child.bias, in_c))
    if tied is not None and packable(tied.weight, in_c):
        model.head = PackedLinear(tied.weight, None, in_c)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.together = _together(module)


def fastest_dtype(decoder: DecoderConfig, candidates: Sequence[torch.dtype]) -> torch.dtype:
    """The type in which a decoder's products are fastest on this CPU.

    Args:
        decoder: Its shapes.
        candidates: The first is taken unless another is clearly faster.
    """
    heads = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
    shapes = (
        (heads, decoder.hidden_size),
        (decoder.hidden_size, decoder.num_heads * decoder.head_dim),
        (2 * decoder.intermediate_size, decoder.hidden_size),
        (decoder.hidden_size, decoder.intermediate_size),
    )
    best, *others = (dispatch.products_ms(shapes, dtype) for dtype in candidates)
    found = candidates[0]
    for dtype, ms in zip(candidates[1:], others, strict=True):
        # A decoding step counts as much as a prompt, though a prompt takes longer.
        if math.prod(b / m for b, m in zip(best, ms, strict=True)) > MARGIN ** len(ms):
            best, found = ms, dtype
    return found


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
