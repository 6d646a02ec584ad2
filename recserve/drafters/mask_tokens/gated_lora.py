"""Mask tokens of a decoder: trained inputs, and low-rank updates of the products of their rows.

    input of a mask's row    mask_embeddings[i]
    product in a mask's row  W x + scale * B A x
    all other rows           the decoder's own embedding, W x

Source: Samragh et al. (arXiv 2507.11851), sections 3.1 and 3.2; LoRA is from arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.attention import Attend
from recserve.models.config import DecoderConfig
from recserve.models.decoder import AuxHiddenStates
from recserve.models.language_model import LanguageModel


class LowRank(nn.Module):
    """Low-rank updates of projections that one matrix of a decoder layer holds together.

    Attributes:
        down: [n * r, m] matrices A of the n projections.
        ups: Matrix B [size, r] of each projection.
        scale: Factor of the updates.
    """

    def __init__(self, inner: int, sizes: list[int], rank: int, scale: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(len(sizes) * rank, inner))
        self.ups = nn.ParameterList(torch.zeros(size, rank) for size in sizes)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Returns the update [..., sum of sizes] of rows x [..., m]."""
        parts = F.linear(x, self.down).chunk(len(self.ups), dim=-1)
        own = [F.linear(part, up) for part, up in zip(parts, self.ups, strict=True)]
        return torch.cat(own, dim=-1) * self.scale


def part_sizes(config: DecoderConfig) -> Mapping[str, tuple[int, list[int]]]:
    """Returns the inputs, and the outputs of each projection, of the parts of a decoder layer."""
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    size, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (size, [heads, kv_heads, kv_heads]),
        "output": (heads, [size]),
        "gate_up": (size, [inner, inner]),
        "down": (inner, [size]),
    }


class GatedLora(nn.Module):
    """Embeddings of k mask tokens, and the updates of every layer.

    Attributes:
        embeddings: [k, E].
        rank: r of every update.
        alpha: LoRA's numerator: an update is multiplied by alpha / r.
        folder: Where they were loaded from. None for mask tokens that were not loaded.
    """

    def __init__(self, config: DecoderConfig, num_masks: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha
        self.folder: Path | None = None
        self.embeddings = nn.Parameter(torch.zeros(num_masks, config.hidden_size))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    part: LowRank(inner, sizes, rank, alpha / rank)
                    for part, (inner, sizes) in part_sizes(config).items()
                }
            )
            for _ in range(config.num_layers)
        )

    def equals(self, other: GatedLora) -> bool:
        """Returns whether two sets of mask tokens are one, or were loaded from one folder."""
        if self is other:
            return True
        if self.folder is None or self.folder != other.folder or self.alpha != other.alpha:
            return False
        own, theirs = self.state_dict(), other.state_dict()
        return own.keys() == theirs.keys() and all(
            torch.equal(tensor, theirs[name]) for name, tensor in own.items()
        )

    @property
    def num_masks(self) -> int:
        """k, the number of mask tokens."""
        return self.embeddings.shape[0]


@dataclass(frozen=True)
class MaskRows:
    """The rows of mask tokens among the rows of a forward pass, as updates of its products.

    Attributes:
        lora: Embeddings and updates.
        numbers: [T] number of each row's mask token, negative for all other rows.
        fixed_shapes: True to compute the updates of all rows and select, so that no shape depends
            on values. False computes them for the rows of mask tokens only.
    """

    lora: GatedLora
    numbers: Tensor
    fixed_shapes: bool = False

    @cached_property
    def _open(self) -> Tensor:
        return self.numbers >= 0

    @cached_property
    def rows(self) -> Tensor:
        """[n] the rows of mask tokens. On a device, reading it waits for the device."""
        return self._open.nonzero()[:, 0]

    def forward(
        self,
        model: LanguageModel,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """Returns a model's states as `LanguageModel.forward` does, with the mask tokens as inputs.

        The tokens of their rows have no meaning.
        """
        x = self.embed(model.embed(tokens))
        hidden: Tensor = model.decoder(x, positions, attend, rows, aux_states, self)
        return hidden

    def embed(self, x: Tensor) -> Tensor:
        """Returns embedded tokens [..., T, E] with the inputs of the mask tokens replaced."""
        own = self.lora.embeddings[self.numbers.clamp(min=0)]
        return torch.where(self._open[:, None], own.to(x.dtype), x)

    def add(self, layer: int, part: str, x: Tensor, out: Tensor) -> Tensor:
        """Returns a product `out` of x with the updates added. All other rows keep their bits.

        Args:
            layer: Number of the layer.
            part: `qkv`, `output`, `gate_up` or `down`.
            x: [..., T, m] inputs of the product.
            out: [..., T, n] the product.
        """
        update = self.lora.layers[layer][part]  # type: ignore[index]
        if self.fixed_shapes:
            return torch.where(self._open[:, None], out + update(x), out)
        rows = self.rows
        return out.index_add(-2, rows, update(x.index_select(-2, rows)).to(out.dtype))

    def select(self, rows: Tensor) -> MaskRows:
        """Returns the mask rows of some rows [R]."""
        return replace(self, numbers=self.numbers[rows])
