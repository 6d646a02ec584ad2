"""The item graph of a trained recommender: made when training ends, kept beside its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recserve.bundle.bundle import ITEM_GRAPH
from recserve.features.vectors.item_graph import ItemLinks, link_items
from recserve.models.recommender import Recommender

# Below this a search costs more than it saves: docs/results/quality.md has the times.
MIN_ITEMS = 32_768


def links_of(model: Recommender, codes: np.ndarray) -> ItemLinks:
    """Link the items by what the level heads compare states with. codes: [I, L]."""
    levels = range(model.config.num_levels)
    books = [model.level_codes(level).detach().float().cpu().numpy() for level in levels]
    return link_items(codes, books)


def save_graph(model: Recommender, codes: np.ndarray, directory: Path) -> None:
    """Write the graph of a model with level heads over a large catalogue; take away an earlier one,
    whose embeddings are no longer these.
    """
    path = directory / ITEM_GRAPH
    path.unlink(missing_ok=True)
    if model.config.level_heads and len(codes) >= MIN_ITEMS:
        links_of(model, codes).save(path)
