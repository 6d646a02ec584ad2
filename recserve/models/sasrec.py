"""SASRec, the baseline: self-attention over item ids, trained with cross-entropy over all items.

The published model scores by a dot product of ids. Options add what the recommender has: frozen
item vectors, and a scaled cosine instead of the dot product. Source: arXiv 1808.09781;
cross-entropy: arXiv 2309.07602.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.files import read_record
from recserve.models.attention import DenseAttention
from recserve.models.config import MAX_ROWS, MOST
from recserve.models.weight_check import check_weights, read_weights
from recserve.models.write_tensors import write_tensors


@dataclass(frozen=True)
class SasRecConfig:
    """Configuration of a SASRec model.

    Attributes:
        num_items: I.
        vector_dim: F of frozen item vectors, 0 for ids alone.
        cosine: Whether logits are scaled cosines.
        input_scale: Factor of the item embeddings in the input. An item counts for little beside
            the layers' outputs without it; the published model uses sqrt(hidden_size).
        max_history_items: Length of the position table. Only the latest items of a longer history
            are read.

    Raises:
        ValueError: If the sizes do not fit each other.
    """

    num_items: int
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    dropout: float = 0.3
    max_history_items: int = 50
    vector_dim: int = 0
    cosine: bool = False
    input_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (
            *(("num_items", 1), ("hidden_size", 1), ("num_layers", 0), ("num_heads", 1)),
            *(("max_history_items", 1), ("vector_dim", 0)),
        ):
            most = MOST.get(name, MAX_ROWS)
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least}..{most}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; expected 0 to below 1")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, not a multiple of num_heads {self.num_heads}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; `files.read_record` reads it back."""
        return asdict(self)


class SasRecLayer(nn.Module):
    """Attention and a two-layer network, each after a LayerNorm and with a residual."""

    def __init__(self, config: SasRecConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.attention_norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.output = nn.Linear(size, size)
        self.mlp_norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [B, S, E] to the same shape, causally."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.config.num_heads, -1))
        mixed = DenseAttention()(0, *heads.unbind(-3)).flatten(-2)
        x = x + self._dropout(self.output(mixed))
        return x + self._dropout(self.down(self._dropout(F.relu(self.up(self.mlp_norm(x))))))

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)


class SasRec(nn.Module):
    """Item embeddings (ids, and vectors if configured), positions, layers."""

    vectors: Tensor | None

    def __init__(self, config: SasRecConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.ids = nn.Embedding(config.num_items, size)
        self.positions = nn.Embedding(config.max_history_items, size)
        self.layers = nn.ModuleList(SasRecLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(size)
        if config.vector_dim:
            self.projection = nn.Linear(config.vector_dim, size, bias=False)
        if config.cosine:
            self.scale = nn.Parameter(torch.tensor(1 / 0.07))
        self.register_buffer("vectors", None, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def bind_vectors(self, vectors: Tensor | None) -> None:
        """Binds the catalogue's vectors [I, F] if the config has them.

        Raises:
            ValueError: If they are missing or of another size.
        """
        if not self.config.vector_dim:
            return
        wanted = (self.config.num_items, self.config.vector_dim)
        if vectors is None or tuple(vectors.shape) != wanted:
            came = None if vectors is None else tuple(vectors.shape)
            raise ValueError(f"vectors are {came}; this model needs {wanted}, [I, F]")
        self.vectors = F.normalize(vectors.to(self.ids.weight.device, torch.float32), dim=-1)

    def items(self) -> Tensor:
        """Returns the item embeddings [I, E], used as input and as output."""
        if self.vectors is None:
            return self.ids.weight
        rows: Tensor = self.ids.weight + self.projection(self.vectors)
        return rows

    def forward(self, rows: Tensor) -> Tensor:
        """Maps histories to states [B, S, E]. rows: [B, S] item rows, right-padded with any row."""
        x = F.embedding(rows, self.items()) * self.config.input_scale
        x = x + self.positions.weight[: rows.shape[1]]
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        hidden: Tensor = self.norm(x)
        return hidden

    def queries(self, hidden: Tensor) -> Tensor:
        """Maps states [n, E] to queries [n, E], which are multiplied with `keys`."""
        return F.normalize(hidden, dim=-1) * self.scale if self.config.cosine else hidden

    def keys(self) -> Tensor:
        """Returns the items [I, E] as the logits use them."""
        return F.normalize(self.items(), dim=-1) if self.config.cosine else self.items()

    def scores(self, hidden: Tensor) -> Tensor:
        """Returns logits [n, I] float32 of all items. hidden: [n, E]."""
        query = self.queries(hidden)
        return F.linear(query, self.keys().to(query.dtype)).float()


def save_sasrec(model: SasRec, directory: Path | str) -> None:
    """Writes `config.json` and `model.safetensors`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(model.state_dict(), directory / "model.safetensors")
    text = json.dumps(model.config.to_dict(), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def load_sasrec(
    directory: Path | str, vectors: Tensor | None = None, device: torch.device | str = "cpu"
) -> SasRec:
    """Reads what `save_sasrec` wrote, in eval mode.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file does not fit; the message names it.
    """
    directory = Path(directory)
    config = read_record(directory / "config.json", SasRecConfig)
    path = directory / "model.safetensors"
    weights = read_weights(path)
    check_weights(SasRec, config, weights, path)
    model = SasRec(config)
    model.load_state_dict(weights)
    model.to(device)
    model.bind_vectors(vectors)
    return model.eval()
