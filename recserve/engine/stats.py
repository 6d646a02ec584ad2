"""A look at the engine: what waits, what runs, what the pages hold."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from recserve.engine.items.search_graphs import RecordedSearch, SearchGraphs
from recserve.engine.runtime.delivery import AnyLane
from recserve.engine.text.graphs import RecordedStep, StepGraphs


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine; pages and prefix tokens are sums over the models.

    background: requests that nobody waits for, waiting or running; not part of the others.
    graph_steps: text steps by what became of them (engine/text/graphs.py), graph_searches: searches
    (engine/items/search_graphs.py); graph_seconds, graph_bytes: what each record took, by its name;
    unrecorded: names of those that were to be made and were not. Empty where nothing is recorded.
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


def stats_of(
    queue_depth: int,
    lanes: Seq[AnyLane],
    graphs: StepGraphs | None = None,
    searches: SearchGraphs | None = None,
    background: int = 0,
) -> EngineStats:
    """Lanes that share a pool are counted once. graphs: of the text lane."""
    recorded = list[RecordedStep | RecordedSearch](graphs.recorded if graphs else [])
    recorded += searches.recorded if searches else []
    missing = [name for some in (graphs, searches) if some for name in some.unrecorded]
    pools = {id(lane.cache): lane for lane in lanes}.values()
    return EngineStats(
        queue_depth,
        sum(lane.num_running for lane in lanes),
        sum(lane.allocator.num_free for lane in pools),
        sum(lane.cache.num_pages for lane in pools),
        sum(lane.allocator.num_pages for lane in pools),
        sum(lane.cache.num_hit_tokens for lane in pools),
        sum(lane.cache.num_missed_tokens for lane in pools),
        background,
        {} if graphs is None else {str(name): n for name, n in graphs.counts.items()},
        {} if searches is None else {str(name): n for name, n in searches.counts.items()},
        {made.bucket.name: made.seconds for made in recorded},
        {made.bucket.name: made.bytes for made in recorded},
        missing,
    )
