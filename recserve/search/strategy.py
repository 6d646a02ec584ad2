"""Recommend strategies: their base class, the heads that they use, and their registry by name.

A new strategy is one file in search/strategies/ and one line in `BUILT_IN`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import ClassVar, Literal, Self

from recserve.core.plugins import Pluggable, with_plugins
from recserve.core.strategy import Strategy
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.item_heads import SelfDraftHead
from recserve.models.semantic_id_model import SemanticIdModel

ENTRY_POINTS = "recserve.strategies"
# Reports list strategies in this order.
BUILT_IN = (
    "recserve.search.strategies.beam:BeamStrategy",
    "recserve.search.strategies.speculative:SpeculativeStrategy",
    "recserve.search.strategies.nezha:NezhaStrategy",
    "recserve.search.strategies.rpg:RpgStrategy",
    "recserve.search.strategies.dense:DenseStrategy",
    "recserve.search.strategies.specgr:SpecGRStrategy",
)


@dataclass(frozen=True)
class Heads:
    """The networks that strategies draft or retrieve with, in addition to the recommender.

    A head that was not trained is None. Strategies that need it are then not offered.

    Attributes:
        prefixes: Drafts prefixes for `speculative`.
        nezha: Decodes for `nezha`.
        retriever: Retrieves items for `dense` and `specgr`.
    """

    prefixes: SelfDraftHead | None = None
    nezha: SelfDraftHead | None = None
    retriever: DenseRetriever | None = None


AutoRole = Literal["preferred", "default", "fallback", "hurried"]
DenseWeight = Literal["used", "ignored", "refused"]


class RecommendStrategy(Strategy, Pluggable):
    """A strategy that requests select by name.

    All strategies honour exclusions, filters and caps (`search.slates.slate_under_caps`).

    Attributes:
        name: Name in requests, settings and reports.
        exact: Whether a slate equals full beam search.
        dense_weight: How the strategy treats a request's dense weight.
        outcome: Whether the strategy reads a request's outcome weights.
        invariant: Whether its results are bitwise independent of other requests in the invariant
            mode.
        auto: When `auto` selects it. `preferred` goes before `default`, and `fallback` comes last;
            `hurried` is for requests with a near deadline. None: never.
        missing: Advice for bundles for which `from_models` returns None.
    """

    exact: ClassVar[bool] = False
    dense_weight: ClassVar[DenseWeight] = "refused"
    outcome: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    auto: ClassVar[AutoRole | None] = None
    missing: ClassVar[str] = "this bundle lacks a model that the strategy needs"

    @classmethod
    @abstractmethod
    def from_models(cls, model: SemanticIdModel, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender, None if a required model or head is missing."""


@cache
def strategy_classes() -> Mapping[str, type[RecommendStrategy]]:
    """Returns all strategy classes by name, those of installed plug-ins last.

    Raises:
        PluginError: If an installed distribution registers a strategy that cannot be used.
    """
    return with_plugins(ENTRY_POINTS, RecommendStrategy, list(map(resolve_name, BUILT_IN)))


def recommend_strategies(model: SemanticIdModel, heads: Heads) -> dict[str, RecommendStrategy]:
    """Returns the strategies by name that a recommender and its trained heads support."""
    strategies = {name: cls.from_models(model, heads) for name, cls in strategy_classes().items()}
    return {name: strategy for name, strategy in strategies.items() if strategy is not None}
