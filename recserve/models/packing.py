"""Packs weights in the layout of the fastest matrix products, for serving on a CPU.

`kernels/linear/products.py` has the rule of who multiplies. A row of a product has the same bits
for any number of rows.

Weights can also be stored in a format of `kernels/linear/formats.py`, on any device. C and Triton
multiply them as they are where they have kernels for it. Elsewhere every product decodes the
weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recserve.kernels.decoder.decoder import LayerShape, LayerWeights, NativeLayers
from recserve.kernels.linear import products
from recserve.kernels.linear.formats import FORMATS
from recserve.kernels.linear.panels import Panels
from recserve.kernels.linear.products import (
    LinearFn,
    OneDnnProduct,
    onednn_multiplies,
    stored_product,
)
from recserve.kernels.native.native import LANES
from recserve.models.decoder import Decoder, DecoderLayer, Silu
from recserve.models.language_model import LanguageModel
from recserve.models.semantic_id_model import Network


class PackedLinear(nn.Module):
    """nn.Linear for inference: x W^T + b, with W in the layout of the fastest product.

    Attributes:
        shape: (n, m) of the weight.
        dtype: Type of the weight before packing, which is that of the activations.
        stored: Format of the packed weight. None means the weight's own type.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        stored: str | None = None,
    ) -> None:
        """Packs a weight [n, m] and a bias [n] for which `packable` is true.

        Args:
            weight: [n, m].
            bias: [n], or None.
            stored: Format of the packed weight. None means the weight's own type.
        """
        super().__init__()
        self.shape = weight.shape[0], weight.shape[1]
        self.dtype, self.stored = weight.dtype, stored
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        self._product: LinearFn
        self._product = stored_product(weight, bias, stored) if stored else _pack(weight, bias)

    @property
    def panels(self) -> Panels | None:
        """The packed weight if the product runs in C, else None."""
        product = self._product
        return product if isinstance(product, Panels) else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies x [..., m] and returns [..., n]."""
        return self._product(x)


def _pack(weight: Tensor, bias: Tensor | None) -> Panels | OneDnnProduct:
    if products.runs_in_c(weight):
        return Panels.of(weight, bias)
    return OneDnnProduct(weight, bias)


def packable(weight: Tensor) -> bool:
    """Returns whether this machine can pack a weight [n, m]."""
    return weight.is_cpu and (onednn_multiplies(weight.dtype) or products.runs_in_c(weight))


def row_weights(model: Network) -> int:
    """Returns the number of weights of all linear layers: the multiply-adds of one row."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | PackedLinear)]
    return sum(
        layer.weight.numel() if isinstance(layer, nn.Linear) else math.prod(layer.shape)
        for layer in layers
    )


@torch.no_grad()
def pack_weights(model: nn.Module, stored: str | None = None) -> None:
    """Replaces every linear layer by its packed form, in place.

    The head of a language model is packed too if it is the embedding. Weights that this machine
    cannot pack do not change. A decoder whose products all run in C runs in one call. A packed
    model serves. It cannot be trained, saved or moved to another device.

    Args:
        model: The model.
        stored: Format of the packed weights, on any device. None means their own type. Embeddings
            and norms keep their type. An exact format packs weights where C multiplies them and
            nothing is lost, and has no effect elsewhere.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    tied = model.tokens if isinstance(model, LanguageModel) and model.head is None else None
    weights = [linear.weight for linear in linears] + ([] if tied is None else [tied.weight])
    if stored is not None and FORMATS[stored].exact:
        stored = stored if all(products.runs_in_c(weight, stored) for weight in weights) else None
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and (stored or packable(child.weight)):
                setattr(module, name, PackedLinear(child.weight, child.bias, stored))
    if tied is not None and (stored or packable(tied.weight)):
        model.head = PackedLinear(tied.weight, None, stored)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.whole_decoder = _whole_decoder(module)


def _whole_decoder(decoder: Decoder) -> NativeLayers | None:
    """Returns the layers in one call, if every weight is in panels and of one type."""
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
        types = {p.dtype for p in panels}
        types |= {norm.dtype for norm in (*norms, decoder.norm.weight)}
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
    """Packs linear layers that are attributes of the model, by name. Missing ones are skipped."""
    for name in names:
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and packable(layer.weight):
            setattr(model, name, PackedLinear(layer.weight, layer.bias))


def keep_rows_alike(model: Network) -> None:
    """Makes the bits of SiLU independent of an element's position, as those of products are."""
    for module in model.modules():
        if isinstance(module, Silu):
            module.placeless = True
