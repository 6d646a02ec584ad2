"""A look at the engine: what waits, what runs, what the pages hold."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from recserve.engine.delivery import AnyLane


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine; pages and prefix tokens are sums over the models."""

    queue_depth: int
    running: int
    pages_free: int
    pages_cached: int
    pages_total: int
    prefix_hit_tokens: int
    prefix_missed_tokens: int


def stats_of(queue_depth: int, lanes: Seq[AnyLane]) -> EngineStats:
    """Lanes that share a pool are counted once."""
    pools = {id(lane.cache): lane for lane in lanes}.values()
    return EngineStats(
        queue_depth,
        sum(lane.num_running for lane in lanes),
        sum(lane.allocator.num_free for lane in pools),
        sum(lane.cache.num_pages for lane in pools),
        sum(lane.allocator.num_pages for lane in pools),
        sum(lane.cache.num_hit_tokens for lane in pools),
        sum(lane.cache.num_missed_tokens for lane in pools),
    )
