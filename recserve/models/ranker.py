"""The MTGR ranker: one prefix per user, one token per candidate, HSTU-style layers, task heads.

A candidate's logits depend on its own row, the prefix rows it may see and constants, never on the
other candidates. The normaliser of the attention is a constant, and every norm is per token.
Source: MTGR, arXiv 2505.18654, section 3; HSTU layers, arXiv 2402.17152.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.files import read_record, whole_file
from recserve.models.attention import Attend
from recserve.models.config import MAX_ROWS, MOST, NORM_EPS, check_number
from recserve.models.decoder import Silu
from recserve.models.growable_table import with_rows
from recserve.models.inputs import NodeInputs
from recserve.models.packing import pack_layers, pack_weights
from recserve.models.weight_check import check_weights, read_weights
from recserve.models.write_tensors import write_tensors

PROFILE, LONG, RECENT, CANDIDATE = range(4)
NUM_GROUPS = 4
SIZES = ("num_", "vector_size", "dense_size", "hidden_size", "head_dim", "max_positions")
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class RankerConfig:
    """Configuration of a ranker.

    Attributes:
        num_items: Rows with their own id embedding. Later rows have only their vector.
        vector_size: Width of the item vectors.
        dense_size: Width of `NodeInputs.dense`.
        num_types: Event types.
        max_positions: Positions from this one on share one embedding.
        normalizer: Constant of the SiLU attention.
        id_dropout: Share of item tokens trained without their id embedding, so that new items work.

    Raises:
        ValueError: If a size is below 1 or a probability is outside [0, 1).
    """

    num_items: int
    vector_size: int
    dense_size: int
    num_types: int = 1
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    head_dim: int = 32
    max_positions: int = 512
    normalizer: float = 32.0
    norm_eps: float = 1e-6
    dropout: float = 0.1
    id_dropout: float = 0.2
    tasks: tuple[str, ...] = ("click", "conversion")

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        for name, value in self.to_dict().items():
            most = MOST.get(name, MAX_ROWS)
            if name.startswith(SIZES) and not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; it must be in 1..{most}")
        for name in ("dropout", "id_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        check_number("norm_eps", self.norm_eps, NORM_EPS)
        if not 0 < self.normalizer < math.inf:
            raise ValueError(f"normalizer is {self.normalizer}; it must be above 0")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks are {self.tasks}; name at least one, each once")

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; `files.read_record` reads it back."""
        return asdict(self)


class GroupLayerNorm(nn.Module):
    """LayerNorm with a gain (stored as its difference from 1) and a bias per token group."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(NUM_GROUPS, size))
        self.bias = nn.Parameter(torch.zeros(NUM_GROUPS, size))
        self.eps = eps

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        """Normalises x [..., T, E] by groups [..., T]."""
        normed = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        gain, bias = F.embedding(groups, self.gain + 1), F.embedding(groups, self.bias)
        return torch.addcmul(bias, normed, gain)


class RankerLayer(nn.Module):
    """x + MLP(GroupLN(attention * U)); one projection with SiLU gives Q, K, V, U. No softmax."""

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.num_heads * config.head_dim
        self.shape = (4, config.num_heads, config.head_dim)
        self.input_norm = GroupLayerNorm(size, config.norm_eps)
        self.qkvu = nn.Linear(size, 4 * inner)
        self.silu = Silu()
        self.mixed_norm = GroupLayerNorm(inner, config.norm_eps)
        self.output = nn.Sequential(
            nn.Linear(inner, size), Silu(), nn.Dropout(config.dropout), nn.Linear(size, size)
        )

    def forward(
        self, x: Tensor, groups: Tensor, layer: int, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Maps x [..., T, E] with groups [..., T] to the same shape, or to [..., R, E] of
        `rows`.
        """
        projected = self.silu(self.qkvu(self.input_norm(x, groups)))
        query, key, value, gate = projected.view(*x.shape[:-1], *self.shape).unbind(-3)
        mixed = (attend(layer, query, key, value) * gate).flatten(-2)
        if rows is not None:
            x, mixed = x.index_select(-2, rows), mixed.index_select(-2, rows)
            groups = groups.index_select(-1, rows)
        update: Tensor = self.output(self.mixed_norm(mixed, groups))
        return x + update


class Ranker(nn.Module):
    """Embeddings, layers and task heads. The caller provides attention, as for the decoder."""

    item_vectors: Tensor
    item_table: Tensor | None

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.id_embedding = nn.Embedding(config.num_items, size)
        self.vector_projection = nn.Linear(config.vector_size, size, bias=False)
        self.group_embedding = nn.Embedding(NUM_GROUPS, size)
        self.type_embedding = nn.Embedding(config.num_types + 1, size)
        self.position_embedding = nn.Embedding(config.max_positions, size)
        self.dense_projection = nn.Linear(config.dense_size, size, bias=False)
        self.mixer = nn.Sequential(nn.Linear(size, 2 * size), Silu(), nn.Linear(2 * size, size))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(RankerLayer(config) for _ in range(config.num_layers))
        self.norm = GroupLayerNorm(size, config.norm_eps)
        self.head = nn.Sequential(nn.Linear(size, size), Silu(), nn.Linear(size, len(config.tasks)))
        for table in (self.id_embedding, self.type_embedding, self.position_embedding):
            nn.init.normal_(table.weight, std=0.02)
        self.register_buffer("dense_mean", torch.zeros(config.dense_size))
        self.register_buffer("dense_scale", torch.ones(config.dense_size))
        self.register_buffer("item_vectors", torch.zeros(0, config.vector_size), persistent=False)
        self.register_buffer("item_table", None, persistent=False)
        self.num_bound_items = 0

    def bind_items(self, vectors: Tensor) -> None:
        """Binds the catalogue's item vectors [I, F]; they are not saved with the weights.

        I may exceed `config.num_items`: items added after training have no id embedding. Frozen
        embeddings are recomputed and swapped in as a whole, so a running server may call this.

        Raises:
            ValueError: If F differs from `config.vector_size` or I is below `config.num_items`.
        """
        c = self.config
        if vectors.ndim != 2 or vectors.shape[1] != c.vector_size:
            raise ValueError(
                f"item vectors have shape {tuple(vectors.shape)}; expected [I, {c.vector_size}]"
            )
        if vectors.shape[0] < c.num_items:
            raise ValueError(
                f"got {vectors.shape[0]} item vectors; the model was trained with "
                f"{c.num_items} items"
            )
        self.item_vectors = vectors.to(self.vector_projection.weight)
        self.num_bound_items = vectors.shape[0]
        if self.item_table is not None:
            self.freeze_items()

    @torch.inference_mode()
    def append_items(self, vectors: Tensor, trained_rows: Tensor) -> None:
        """Appends items to a frozen ranker, while others read the items that are bound.

        Args:
            vectors: [n, F].
            trained_rows: [n] row of the trained item whose id embedding the item uses, -1 for
                none.

        Raises:
            ValueError: If `freeze_items` was not called before.
        """
        if self.item_table is None:
            raise ValueError("append_items needs frozen item embeddings; call freeze_items first")
        vectors = vectors.to(self.vector_projection.weight)
        rows = trained_rows.to(vectors.device)
        known = (rows >= 0) & (rows < self.config.num_items)
        ids = self.id_embedding(torch.where(known, rows, 0)) * known[:, None]
        count = self.num_bound_items
        self.item_table = with_rows(self.item_table, count, self.vector_projection(vectors) + ids)
        self.item_vectors = with_rows(self.item_vectors, count, vectors)
        self.num_bound_items = count + len(vectors)

    @torch.no_grad()
    def freeze_items(self) -> None:
        """Computes all item embeddings [I, E] once, for serving; `train()` drops them."""
        table = self.vector_projection(self.item_vectors)
        table[: self.config.num_items] += self.id_embedding.weight
        self.item_table = table

    def pack(self) -> None:
        """Packs the weights for this CPU (packing.py); it cannot be trained or saved afterwards."""
        for part in (self.layers, self.mixer, self.head):
            pack_weights(part)
        pack_layers(self, "dense_projection")

    def train(self, mode: bool = True) -> Ranker:
        """Switches to training or back; training drops the frozen item embeddings."""
        if mode:
            self.item_table = None
        super().train(mode)
        return self

    @torch.no_grad()
    def fit_dense(self, mean: Tensor, deviation: Tensor) -> None:
        """Standardises the dense columns by mean and deviation [dense_size]; deviation 0 is 1."""
        self.get_buffer("dense_mean").copy_(mean)
        self.get_buffer("dense_scale").copy_(1 / deviation.where(deviation > 1e-6, 1.0))

    def embed(self, inputs: NodeInputs) -> Tensor:
        """Embeds rows, each from its own columns alone.

        Args:
            inputs: n rows (any leading shape, the same in all columns). Every column is required.
                `times` holds the position in the prefix.

        Returns:
            [n, E].

        Raises:
            ValueError: If a column is missing.
        """
        groups, types, positions = inputs.groups, inputs.types, inputs.times
        if groups is None or types is None or positions is None or inputs.dense is None:
            raise ValueError("the ranker needs tokens, groups, types, times and dense; one is None")
        dense = (inputs.dense - self.get_buffer("dense_mean")) * self.get_buffer("dense_scale")
        last = self.config.max_positions - 1
        x = self._items(inputs.tokens) * (groups != PROFILE)[..., None]
        x = x + self.group_embedding(groups) + self.type_embedding(types)
        x = x + self.position_embedding(positions.clamp(max=last)) + self.dense_projection(dense)
        embedded: Tensor = self.dropout(x + self.mixer(x))
        return embedded

    def _items(self, rows: Tensor) -> Tensor:
        if self.item_table is not None:
            return F.embedding(rows, self.item_table)
        known = rows < self.config.num_items
        if self.training and self.config.id_dropout:
            known &= torch.rand(rows.shape, device=rows.device) >= self.config.id_dropout
        ids: Tensor = self.id_embedding(rows.clamp(max=self.config.num_items - 1))
        projected: Tensor = self.vector_projection(F.embedding(rows, self.item_vectors))
        return ids * known[..., None] + projected

    def forward(
        self, x: Tensor, groups: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Runs the layers and the final norm.

        Args:
            x: [..., T, E] embedded rows.
            groups: [..., T].
            attend: Attention.
            rows: [R] tokens whose states to return. None means all.

        Returns:
            [..., T, E] or [..., R, E].
        """
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x, groups, number, attend, rows if number == last else None)
        if rows is not None:
            groups = groups.index_select(-1, rows)
        hidden: Tensor = self.norm(x, groups)
        return hidden

    def heads(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., tasks] of candidates [..., E], in the order of `config.tasks`."""
        logits: Tensor = self.head(hidden)
        return logits


def node_inputs(columns: Mapping[str, np.ndarray]) -> NodeInputs:
    """Wraps numpy columns (tokens, groups, types, times, dense) as tensors without copying."""
    return NodeInputs(**{name: torch.from_numpy(column) for name, column in columns.items()})


def save_ranker(model: Ranker, directory: str | Path) -> None:
    """Writes config.json and model.safetensors; each file is replaced atomically."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(model.state_dict(), folder / WEIGHTS_FILE)
    with whole_file(folder / CONFIG_FILE) as new:
        new.write_text(json.dumps(model.config.to_dict(), indent=1), encoding="utf-8")


def load_ranker(
    directory: str | Path, vectors: np.ndarray | Tensor, device: torch.device | str = "cpu"
) -> Ranker:
    """Reads a saved ranker, ready to score: in eval mode, item embeddings frozen.

    Args:
        directory: Folder of `save_ranker`.
        vectors: [I, F] item vectors of the catalogue version to serve.
        device: Device of the weights.

    Raises:
        ValueError: If a file is missing, damaged or does not fit the other.
    """
    folder = Path(directory)
    try:
        config = read_record(folder / CONFIG_FILE, RankerConfig)
        weights = read_weights(folder / WEIGHTS_FILE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no usable ranker: {error}") from error
    check_weights(Ranker, config, weights, folder / WEIGHTS_FILE)
    model = Ranker(config)
    model.load_state_dict(weights)
    try:
        model.bind_items(torch.as_tensor(vectors, dtype=torch.float32))
    except ValueError as error:
        raise ValueError(f"{folder} does not fit the catalogue: {error}") from error
    model = model.to(device).eval()
    model.freeze_items()
    return model
