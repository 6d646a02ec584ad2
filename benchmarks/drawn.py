"""What the benchmarks run on when there is no data: drawn catalogues, weights and histories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from recserve.core.request import Root
from recserve.kernels.trie import Trie, build_trie
from recserve.models.config import DecoderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender, RecommenderConfig

CODES = 256
# Trie nodes per level: Amazon Beauty's under text and collaborative ids, and the same shape grown.
NODES = {12_101: (256, 6_913, 10_818, 12_101), 1_000_000: (256, 54_000, 894_000, 1_000_000)}


@dataclass(frozen=True)
class Catalogue:
    """codes [I, L]; the trie over them."""

    name: str
    codes: torch.Tensor
    trie: Trie


def drawn_catalogue(num_items: int, seed: int = 0) -> Catalogue:
    """Semantic ids whose trie has the node counts of NODES: few wide nodes, many with one child.

    Raises ValueError for a size that NODES does not name.
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
    """Amazon Beauty under its published rqkmeans ids: five levels, the last one disambiguates."""
    table = pq.read_table(data / "amazon-beauty" / "reference_semantic_ids.parquet")
    return _catalogue("Beauty, published ids", np.array(table.column("rqkmeans").to_pylist()))


def _catalogue(name: str, codes: np.ndarray) -> Catalogue:
    tensor = torch.from_numpy(codes)
    sizes = tuple(int(size) for size in codes.max(0) + 1)
    return Catalogue(name, tensor, build_trie(tensor, sizes))


def _branching(rng: np.random.Generator, parents: int, wanted: int) -> np.ndarray:
    """Children of each parent, 1 to CODES, `wanted` in all, skewed."""
    weights = rng.lognormal(0, 1.5, parents)
    counts = np.ones(parents, dtype=np.int64)
    while (missing := wanted - int(counts.sum())) > 0:
        weights[counts >= CODES] = 0
        counts += rng.multinomial(missing, weights / weights.sum())
        counts = counts.clip(max=CODES)
    return counts


def drawn_recommender(
    catalogue: Catalogue, hidden: int, layers: int, normalization: str, dtype: torch.dtype
) -> Recommender:
    """A `codes` recommender, heads of 64, whose logits spread as a trained one's (about 2)."""
    torch.manual_seed(0)
    heads = hidden // 64
    decoder = DecoderConfig(hidden, layers, heads, heads, 64, 4 * hidden)
    sizes = catalogue.trie.codebook_sizes
    model = Recommender(RecommenderConfig(decoder, sizes, "codes", normalization))
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            spread = 2.0 if name == "head.weight" else 1.0
            torch.nn.init.normal_(weight, std=spread * weight.shape[1] ** -0.5)
    model.bind_items(catalogue.codes)
    return model.to(dtype).eval()


def drawn_roots(model: Recommender, items: int, count: int, seed: int) -> list[Root]:
    """Histories of `items` events, BOS first."""
    rng = np.random.default_rng(seed)
    roots = []
    for _ in range(count):
        rows = torch.from_numpy(rng.integers(0, model.num_bound_items, items))
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), model.item_tokens[rows].flatten()])
        roots.append(Root(NodeInputs(tokens), tokens.numpy()))
    return roots
