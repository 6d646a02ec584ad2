"""Statistics of the engine: queues, running requests, pages, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from recserve.core.acceptance_watch import DraftHealth
from recserve.core.strategy import Strategy
from recserve.engine.items.search_graphs import BeamSearchGraphs, CapturedSearch
from recserve.engine.runtime.scheduler import PageOwner
from recserve.engine.text.step_graphs import CapturedStep, TextStepGraphs


@dataclass(frozen=True)
class EngineStats:
    """Figures at one moment.

    Attributes:
        queue_depth: Requests that wait for admission.
        running: Requests that are admitted and have no result.
        pages_free: Free pages, over all models.
        pages_cached: Pages that the prefix caches hold.
        pages_total: All pages.
        prefix_hit_tokens: Prefix tokens found in a prefix cache so far.
        prefix_missed_tokens: Prefix tokens not found in a prefix cache so far.
        background: Background requests, waiting or running. The other figures exclude them.
        graph_steps: Text steps by outcome (engine/text/step_graphs.py).
        graph_searches: Searches by outcome (engine/items/search_graphs.py).
        graph_seconds: Capture time of each graph, by its name.
        graph_bytes: Memory of each graph, by its name.
        unrecorded: Names of the graphs that could not be captured.
        drafts: Acceptance of recent drafts, by drafter or strategy.
        device: Type of the device.
    """

    queue_depth: int
    running: int
    pages_free: int
    pages_cached: int
    pages_total: int
    prefix_hit_tokens: int
    prefix_missed_tokens: int
    background: int = 0
    graph_steps: Mapping[str, int] = field(default_factory=dict)
    graph_searches: Mapping[str, int] = field(default_factory=dict)
    graph_seconds: Mapping[str, float] = field(default_factory=dict)
    graph_bytes: Mapping[str, int] = field(default_factory=dict)
    unrecorded: Seq[str] = ()
    drafts: Mapping[str, DraftHealth] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True)
class Load:
    """Numbers of requests.

    Attributes:
        queued: Requests that wait for admission.
        running: Requests that are admitted and have no result.
        background: Background requests, waiting or running.
    """

    queued: int
    running: int
    background: int


def stats_of(
    load: Load,
    owners: Iterable[PageOwner],
    graphs: TextStepGraphs | None = None,
    searches: BeamSearchGraphs | None = None,
) -> EngineStats:
    """Returns the statistics of an engine.

    Args:
        load: Numbers of requests.
        owners: The page owners of all schedulers. Owners that share a pool count once.
        graphs: Captured text steps.
        searches: Captured searches.
    """
    captured = list[CapturedStep | CapturedSearch](graphs.captured if graphs else [])
    captured += searches.captured if searches else []
    missing = [name for some in (graphs, searches) if some for name in some.missing]
    pools = list({id(owner.cache): owner for owner in owners}.values())
    return EngineStats(
        queue_depth=load.queued,
        running=load.running,
        pages_free=sum(pool.allocator.num_free for pool in pools),
        pages_cached=sum(pool.cache.num_pages for pool in pools),
        pages_total=sum(pool.allocator.num_pages for pool in pools),
        prefix_hit_tokens=sum(pool.cache.num_hit_tokens for pool in pools),
        prefix_missed_tokens=sum(pool.cache.num_missed_tokens for pool in pools),
        background=load.background,
        graph_steps={str(name): n for name, n in graphs.counts.items()} if graphs else {},
        graph_searches={str(name): n for name, n in searches.counts.items()} if searches else {},
        graph_seconds={made.bucket.name: made.seconds for made in captured},
        graph_bytes={made.bucket.name: made.bytes for made in captured},
        unrecorded=missing,
    )


def watched(strategies: Mapping[str, Strategy]) -> dict[str, DraftHealth]:
    """Returns the acceptance of recent drafts of the strategies that draft."""
    watches = [(name, strategy.watch) for name, strategy in list(strategies.items())]
    return {name: watch.health() for name, watch in watches if watch is not None}
