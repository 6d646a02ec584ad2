"""Random catalogues, weights and histories for benchmarks without data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from recserve.core.request import Prefix
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import Ranker, RankerConfig
from recserve.models.recommender import Recommender

Normalization = Literal["children", "vocabulary"]
CODES = 256
# Trie nodes per level: Amazon Beauty's with text and collaborative ids, and the same shape scaled.
NODES = {12_101: (256, 6_913, 10_818, 12_101), 1_000_000: (256, 54_000, 894_000, 1_000_000)}


@dataclass(frozen=True)
class Catalogue:
    """Semantic ids [I, L] and their trie."""

    name: str
    codes: torch.Tensor
    trie: Trie


def drawn_catalogue(num_items: int, seed: int = 0) -> Catalogue:
    """Returns random semantic ids whose trie has the node counts of NODES.

    Few nodes are wide, and many have one child.

    Raises:
        ValueError: If NODES lacks this size.
    """
    if num_items not in NODES:
        raise ValueError(f"num_items is {num_items}; choose one of {sorted(NODES)}")
    rng = np.random.default_rng(seed)
    codes = np.zeros((1, 0), dtype=np.int64)
    for wanted in NODES[num_items]:
        parents = codes.shape[0]
        counts = _branching(rng, parents, wanted)
        parent = np.repeat(np.arange(parents), counts)
        sibling = np.arange(wanted) - np.repeat(counts.cumsum() - counts, counts)
        # An odd stride visits distinct codes.
        first = rng.integers(0, CODES, parents)[parent]
        stride = 2 * rng.integers(0, CODES // 2, parents)[parent] + 1
        code = (first + sibling * stride) % CODES
        codes = np.concatenate([codes[parent], code[:, None]], axis=1)
    return _catalogue(f"{num_items:,} items", rng.permutation(codes))


def published_catalogue(data: Path) -> Catalogue:
    """Returns Amazon Beauty with its published rqkmeans ids of five levels.

    The last level disambiguates.
    """
    # Imported here because the other catalogues must work with only torch installed.
    import pyarrow.parquet as pq

    table = pq.read_table(data / "amazon-beauty" / "reference_semantic_ids.parquet")
    return _catalogue("Beauty, published ids", np.array(table.column("rqkmeans").to_pylist()))


def _catalogue(name: str, codes: np.ndarray) -> Catalogue:
    tensor = torch.from_numpy(codes)
    sizes = tuple(int(size) for size in codes.max(0) + 1)
    return Catalogue(name, tensor, build_trie(tensor, sizes))


def _branching(rng: np.random.Generator, parents: int, wanted: int) -> np.ndarray:
    """Returns the skewed number of children of each parent, 1 to CODES, `wanted` in total."""
    weights = rng.lognormal(0, 1.5, parents)
    counts = np.ones(parents, dtype=np.int64)
    while (missing := wanted - int(counts.sum())) > 0:
        weights[counts >= CODES] = 0
        counts += rng.multinomial(missing, weights / weights.sum())
        counts = counts.clip(max=CODES)
    return counts


def drawn_recommender(
    catalogue: Catalogue,
    hidden: int,
    layers: int,
    normalization: Normalization,
    dtype: torch.dtype,
    level_heads: bool = False,
) -> Recommender:
    """Returns a random `codes` recommender whose logits spread as a trained one's (about 2)."""
    torch.manual_seed(0)
    heads = hidden // 64
    decoder = DecoderConfig(hidden, layers, heads, heads, 64, 4 * hidden)
    sizes = catalogue.trie.codebook_sizes
    config = RecommenderConfig(decoder, sizes, "codes", normalization, level_heads=level_heads)
    model = Recommender(config)
    _draw_weights(model, catalogue)
    return model.to(dtype).eval()


def drawn_there(
    catalogue: Catalogue, decoder: DecoderConfig, dtype: torch.dtype, device: str
) -> Recommender:
    """Returns a random recommender of any shape, normalised over valid children, on the device."""
    torch.manual_seed(0)
    config = RecommenderConfig(decoder, catalogue.trie.codebook_sizes, "codes", "children")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Recommender(config)
    finally:
        torch.set_default_dtype(before)
    _draw_weights(model, catalogue)
    return model.eval()


def _draw_weights(model: Recommender, catalogue: Catalogue) -> None:
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            spread = 2.0 if name == "head.weight" else 1.0
            torch.nn.init.normal_(weight, std=spread * weight.shape[1] ** -0.5)
    model.bind_items(catalogue.codes)


def drawn_prefixes(model: Recommender, items: int, count: int, seed: int) -> list[Prefix]:
    """Returns histories of `items` events, BOS first."""
    rng = np.random.default_rng(seed)
    prefixes = []
    for _ in range(count):
        rows = torch.from_numpy(rng.integers(0, model.num_bound_items, items))
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), model.item_tokens[rows].flatten()])
        prefixes.append(Prefix(NodeInputs(tokens), tokens.numpy()))
    return prefixes


def drawn_ranker(num_items: int, hidden: int, layers: int) -> Ranker:
    """Returns a random ranker with heads of 64, 24 dense columns and vectors of 64.

    The weights are large enough for attention to matter.
    """
    torch.manual_seed(0)
    ranker = Ranker(
        RankerConfig(
            num_items,
            vector_size=64,
            dense_size=24,
            num_types=3,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=hidden // 64,
            head_dim=64,
        )
    )
    ranker.bind_items(torch.randn(num_items, 64))
    for weight in ranker.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    ranker.eval().freeze_items()
    return ranker


def drawn_ranking_prefix(ranker: Ranker, rows: int, seed: int) -> Prefix:
    """Returns a profile row, nine tenths long-term history, and recent events."""
    g = torch.Generator().manual_seed(seed)
    recent = max(rows // 10, 1)
    groups = torch.ones(rows, dtype=torch.int64)
    groups[0], groups[rows - recent :] = 0, 2
    inputs = NodeInputs(
        torch.randint(0, ranker.config.num_items, (rows,), generator=g),
        groups,
        torch.randint(0, ranker.config.num_types, (rows,), generator=g),
        torch.arange(rows),
        torch.randn(rows, ranker.config.dense_size, generator=g),
    )
    keys = np.random.default_rng(seed).integers(0, 2**62, rows)
    return Prefix(inputs, keys, shared=rows - recent)
