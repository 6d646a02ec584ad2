"""A bundle's recommender with all that its strategies need, answering for many histories."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recserve.bundle.bundle import Bundle, BundleError
from recserve.kernels.trie.item_graph import ItemGraph
from recserve.kernels.trie.trie import build_trie
from recserve.models.recommender import load_recommender
from recserve.search.strategies.registry import strategy_classes
from recserve.service.model_loader import graph_of_links, item_index, load_heads, load_item_graph
from recserve.training.evaluation.slates import SlateOptions, Slates
from recserve.training.item_graph import links_of

EXHAUSTIVE = "exhaustive"


@dataclass(frozen=True)
class BundleSlates:
    """slates: the engine with every head the bundle holds. dense_weight: the bundle's own.

    graph: of similar items; made here where the bundle keeps none; None without level heads.
    """

    slates: Slates
    graph: ItemGraph | None
    dense_weight: float

    @staticmethod
    def open(bundle: Bundle, device: torch.device | str = "cpu") -> BundleSlates:
        """Raises BundleError if no recommender was trained."""
        if not bundle.has("recommender"):
            raise BundleError(
                f"{bundle.root}: no recommender was trained; run `recserve train recommender`"
            )
        catalog, place = bundle.catalog(), torch.device(device)
        codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
        vectors = torch.from_numpy(catalog.vectors)
        model = load_recommender(bundle.directory("recommender"), codes, vectors, place)
        model.pack()  # as the server does
        heads = load_heads(bundle, model)
        trie = build_trie(codes, model.config.codebook_sizes).to(place)
        slates = Slates(model, trie, catalog.index.codes, heads, item_index(model, heads))
        slates.engine.record(trie)
        graph = load_item_graph(bundle, place)
        if graph is None and "rpg" in slates.engine.strategies:
            graph = graph_of_links(links_of(model, catalog.index.codes), place)
        return BundleSlates(
            slates, graph, float(bundle.manifest.recommender.get("dense_weight", 0.0))
        )

    @property
    def autoregressive(self) -> bool:
        """Whether the recommender learned its codes one after another."""
        return bool(self.slates.model.config.autoregressive)

    def options(
        self, strategy: str, width: int, filtered: bool, dense_weight: float | None = None
    ) -> SlateOptions:
        """How a strategy makes slates; `exhaustive` is `rpg` on all items.

        dense_weight: of strategies that use one; None: the bundle's. Raises BundleError
        where nothing was trained for the strategy.
        """
        asked = "rpg" if strategy == EXHAUSTIVE else strategy
        if asked not in self.slates.engine.strategies:
            raise BundleError(strategy_classes()[asked].missing)
        weight = self.dense_weight if dense_weight is None else dense_weight
        return SlateOptions(
            width,
            filtered,
            weight if strategy_classes()[asked].dense_weight == "used" else 0.0,
            asked,
            self.graph if strategy == "rpg" else None,
        )
