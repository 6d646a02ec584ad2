"""The dense retriever: vectors of histories, one per outcome and time offset, and vectors of items.

    query(h, o, d) = norm(W h + MLP([h, outcome_o, offset_d]))      item(x) = norm(x + MLP(x))

x is the recommender's embedding of the item (Recommender.embed_items), so items without a learned
id also have a vector. The first layer of an MLP over concatenated inputs is a sum of three
products. The products of outcome and offset are learned directly, so K offsets cost one product
with h. Source: PinRec, arXiv 2504.10507, outcome conditioning and temporal multi-token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.files import read_record
from recserve.models.config import MAX_ROWS, check_number
from recserve.models.recommender import Recommender
from recserve.models.semantic_id_model import SemanticIdModel, item_tables
from recserve.models.weight_check import check_weights, read_weights
from recserve.models.write_tensors import write_tensors


@dataclass(frozen=True)
class RetrieverConfig:
    """Configuration of a retriever, stored in `config.json`.

    Attributes:
        hidden_size: E of its recommender.
        width: Width of the hidden layers.
        outcomes: [O] names.
        outcome_shares: [O] mix for a request without one.
        offset_unit: Unit of the distance from the last event to a future one: `events` or
            `seconds`.
        offset_bounds: [K] lower bound of each offset, ascending.
        offset_shares: [K] share of each offset in a slate.

    Raises:
        ValueError: If a value does not fit; the message names the field.
    """

    hidden_size: int
    width: int
    outcomes: tuple[str, ...]
    outcome_shares: tuple[float, ...]
    offset_unit: Literal["events", "seconds"]
    offset_bounds: tuple[float, ...]
    offset_shares: tuple[float, ...]

    def __post_init__(self) -> None:
        for size in ("hidden_size", "width"):
            check_number(size, getattr(self, size), (1, MAX_ROWS))
        for name, values, shares in (
            ("outcome", self.outcomes, self.outcome_shares),
            ("offset", self.offset_bounds, self.offset_shares),
        ):
            if not values or len(values) != len(shares):
                raise ValueError(
                    f"{name}_shares are {shares}; expected one share for each of {values}"
                )
            if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
                raise ValueError(f"{name}_shares are {shares}; expected shares >= 0 of sum 1")
        if self.offset_unit not in ("events", "seconds"):
            raise ValueError(f"offset_unit is {self.offset_unit!r}; choose 'events' or 'seconds'")


class DenseRetriever(nn.Module):
    """Query head and item head. `scale` turns a cosine into a logit of the training softmax."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        self.config = config
        size, width = config.hidden_size, config.width
        self.direct = nn.Linear(size, size, bias=False)
        self.state = nn.Linear(size, width)
        self.outcomes = nn.Embedding(len(config.outcomes), width)
        self.offsets = nn.Embedding(len(config.offset_bounds), width)
        self.project = nn.Linear(width, size)
        self.item_in = nn.Linear(size, width)
        self.item_out = nn.Linear(width, size)
        self.scale = nn.Parameter(torch.tensor(1 / 0.07))
        nn.init.eye_(self.direct.weight)
        for embedding in (self.outcomes, self.offsets):
            nn.init.normal_(embedding.weight, std=0.5)  # comparable to W h in size
        for last in (self.project, self.item_out):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    @torch.no_grad()
    def start_from(self, recommender: Recommender) -> None:
        """Starts from the recommender's dense head if it has one."""
        if recommender.config.dense_head:
            self.direct.weight.copy_(recommender.dense_query.weight)
            self.scale.copy_(recommender.dense_scale)

    def queries(self, hidden: Tensor, outcomes: Tensor, offsets: Tensor) -> Tensor:
        """Returns unit query vectors [..., E].

        Args:
            hidden: [..., E].
            outcomes: [...] outcome numbers, broadcast.
            offsets: [...] offset numbers, broadcast.
        """
        inner = self.state(hidden) + self.outcomes(outcomes) + self.offsets(offsets)
        return F.normalize(self.direct(hidden) + self.project(F.gelu(inner)), dim=-1)

    def items(self, embedded: Tensor) -> Tensor:
        """Returns unit vectors [..., E] of items. embedded: [..., E] of Recommender.embed_items."""
        return F.normalize(embedded + self.item_out(F.gelu(self.item_in(embedded))), dim=-1)


@torch.no_grad()
def item_vectors(
    retriever: DenseRetriever,
    recommender: SemanticIdModel,
    rows: Tensor | None = None,
    chunk: int = 16_384,
) -> Tensor:
    """Returns unit vectors [n, E] float32 of item rows, on the host.

    Args:
        retriever: The retriever.
        recommender: The recommender that embeds the items.
        rows: [n] item rows. None means all bound items.
        chunk: Items computed at once.
    """
    items = item_tables(recommender)
    if rows is None:
        rows = torch.arange(items.num_bound_items)
    rows = rows.to(items.item_tokens.device)
    parts = [retriever.items(items.embed_items(part)) for part in torch.split(rows, chunk)]
    return torch.cat(parts).float().cpu()


def save_retriever(retriever: DenseRetriever, directory: Path | str) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(retriever.state_dict(), folder / "model.safetensors")
    text = json.dumps(asdict(retriever.config), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load_retriever(directory: Path | str, recommender: SemanticIdModel) -> DenseRetriever:
    """Reads what `save_retriever` wrote, in eval mode, on the recommender's device.

    Raises:
        ValueError: If the files are damaged or were made for another recommender.
    """
    folder = Path(directory)
    try:
        config = read_record(folder / "config.json", RetrieverConfig)
        weights = read_weights(folder / "model.safetensors")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no usable dense retriever: {error}") from error
    wanted = recommender.config.decoder.hidden_size
    if config.hidden_size != wanted:
        raise ValueError(
            f"{folder} was made for hidden size {config.hidden_size}; this recommender has {wanted}"
        )
    check_weights(DenseRetriever, config, weights, folder / "model.safetensors")
    retriever = DenseRetriever(config)
    retriever.load_state_dict(weights)
    return retriever.to(recommender.tokens.weight).eval()
