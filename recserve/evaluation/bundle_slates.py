"""Slates of a bundle's recommender for many histories, with any strategy that the bundle allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.item_graph import links_of
from recserve.evaluation.slates import SlateOptions, Slates
from recserve.kernels.item_graph import ItemGraph
from recserve.kernels.trie.trie import catalog_trie
from recserve.models.imported_model import load_model
from recserve.search.strategy import strategy_classes
from recserve.service.model_loader import graph_of_links, item_index, load_heads, load_item_graph

EXHAUSTIVE = "exhaustive"


@dataclass(frozen=True)
class BundleSlates:
    """A bundle's recommender in an engine, with everything that its strategies need.

    Attributes:
        slates: The engine with every head that the bundle holds.
        graph: Graph of similar items for `rpg`. It is built in memory if the bundle has none, and
            None for a model without level heads.
        dense_weight: The bundle's weight of the dense head.
        saved_graph: Whether the bundle holds the graph.
    """

    slates: Slates
    graph: ItemGraph | None
    dense_weight: float
    saved_graph: bool

    @staticmethod
    def open(bundle: Bundle, device: torch.device | str = "cpu") -> BundleSlates:
        """Raises BundleError if no recommender was trained."""
        if not bundle.has("recommender"):
            raise BundleError(
                f"{bundle.root}: no recommender was trained; run `recserve train recommender`"
            )
        catalog, place = bundle.catalog(), torch.device(device)
        codes = torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64))
        vectors = torch.from_numpy(catalog.vectors)
        model = load_model(bundle.directory("recommender"), codes, vectors, place)
        model.pack()  # the server packs its weights too, so results are comparable
        heads = load_heads(bundle, model)
        trie = catalog_trie(codes, model.config.codebook_sizes, bundle.shadows(catalog)).to(place)
        slates = Slates(model, trie, catalog.semantic_ids.codes, heads, item_index(model, heads))
        slates.engine.capture(trie)
        graph = load_item_graph(bundle, place)
        saved_graph = graph is not None
        if graph is None and "rpg" in slates.engine.selectable:
            graph = graph_of_links(links_of(model, catalog.semantic_ids.codes), place)
        return BundleSlates(slates, graph, bundle.manifest.dense_weight, saved_graph)

    def as_served(self, strategy: str) -> str:
        """Returns the strategy whose slates a server makes.

        Without a graph in the bundle, a server's `rpg` scores all items.
        """
        return EXHAUSTIVE if strategy == "rpg" and not self.saved_graph else strategy

    @property
    def autoregressive(self) -> bool:
        """True if the recommender generates the codes of an item one after another."""
        return bool(self.slates.model.config.autoregressive)

    def options(
        self, strategy: str, width: int, filtered: bool, dense_weight: float | None = None
    ) -> SlateOptions:
        """Returns how a strategy makes slates.

        Args:
            strategy: Name of an engine strategy, or `exhaustive` for `rpg` on all items.
            width: Beam width.
            filtered: True excludes the items of the history.
            dense_weight: Weight of the dense head for strategies that use one; None means the
                bundle's.

        Raises:
            BundleError: If the bundle lacks what the strategy needs.
        """
        served = "rpg" if strategy == EXHAUSTIVE else strategy
        if served not in self.slates.engine.selectable:
            raise BundleError(strategy_classes()[served].missing)
        weight = self.dense_weight if dense_weight is None else dense_weight
        return SlateOptions(
            width,
            filtered,
            weight if strategy_classes()[served].dense_weight == "used" else 0.0,
            served,
            self.graph if strategy == "rpg" else None,
        )
