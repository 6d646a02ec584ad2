"""The components of an engine, as `build_engine` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from recserve.core.strategy import Strategy
from recserve.engine.items.scheduler import ItemScheduler
from recserve.engine.items.search_graphs import BeamSearchGraphs
from recserve.engine.text.scheduler import TextScheduler
from recserve.speculation.drafter import Drafter


@dataclass
class EngineParts:
    """The components that `build_engine` passes to an engine.

    Attributes:
        schedulers: One scheduler for each kind of request, by model name.
        background: Schedulers of background requests, by model name. They share the pages of the
            scheduler of the same name.
        strategies: Strategies of item requests, by name.
        strategy_names: Names that a SlateQuery may use.
        drafters: Drafters of text requests, by name.
        searches: Searches that are replayed as CUDA graphs. None replays none.
    """

    schedulers: dict[str, ItemScheduler | TextScheduler] = field(default_factory=dict)
    background: dict[str, ItemScheduler] = field(default_factory=dict)
    strategies: dict[str, Strategy] = field(default_factory=dict)
    strategy_names: tuple[str, ...] = ()
    drafters: dict[str, Drafter] = field(default_factory=dict)
    searches: BeamSearchGraphs | None = None
