"""Item graph of a trained recommender, built after training and stored with its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recserve.bundle.bundle import ITEM_GRAPH
from recserve.features.vectors.item_graph import ItemLinks, link_items
from recserve.models.semantic_id_model import SemanticIdModel, item_tables

# In a smaller catalogue, scoring all items is faster than a graph search. The measured times are
# in docs/results/performance.md.
MIN_ITEMS = 32_768


def links_of(model: SemanticIdModel, codes: np.ndarray) -> ItemLinks:
    """Links similar items by the level embeddings that the level heads compare states with.

    Args:
        model: A recommender with level heads.
        codes: [I, L] semantic ids of the items.

    Returns:
        The edges of the graph.
    """
    items, levels = item_tables(model), range(len(model.config.codebook_sizes))
    books = [items.level_codes(level).detach().float().cpu().numpy() for level in levels]
    return link_items(codes, books)


def save_graph(model: SemanticIdModel, codes: np.ndarray, directory: Path) -> None:
    """Writes the item graph of a model with level heads over at least MIN_ITEMS items.

    An earlier graph in the folder is deleted in any case, because its embeddings are out of date.

    Args:
        model: The trained recommender.
        codes: [I, L] semantic ids of the items.
        directory: Folder of the recommender in the bundle.
    """
    path = directory / ITEM_GRAPH
    path.unlink(missing_ok=True)
    if model.config.level_heads and len(codes) >= MIN_ITEMS:
        links_of(model, codes).save(path)
