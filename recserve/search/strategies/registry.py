"""Registry of recommend strategies by name.

A new strategy is one file and one line in `BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from recserve.core.plugins import with_plugins
from recserve.models.recommender import Recommender
from recserve.search.recommend_strategy import Heads, RecommendStrategy
from recserve.search.strategies import BUILT_IN

ENTRY_POINTS = "recserve.strategies"


@cache
def strategy_classes() -> Mapping[str, type[RecommendStrategy]]:
    """Returns all strategy classes by name, those of installed plug-ins last.

    Raises:
        PluginError: If an installed distribution registers a strategy that cannot be used.
    """
    return with_plugins(ENTRY_POINTS, RecommendStrategy, BUILT_IN)


def recommend_strategies(model: Recommender, heads: Heads) -> dict[str, RecommendStrategy]:
    """Returns the strategies by name that a recommender and its trained heads support."""
    built = {name: cls.from_models(model, heads) for name, cls in strategy_classes().items()}
    return {name: strategy for name, strategy in built.items() if strategy is not None}
