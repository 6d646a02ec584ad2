"""Prometheus metrics: the collectors of a server, the engine's figures, and vLLM's names."""

from recserve.metrics.gauges import CatalogLogCounts, Gauges, LogCounts
from recserve.metrics.metrics import ARMS, POSITIONS, SECONDS, STAGES, Metrics
from recserve.metrics.recent import RecentMetrics, RecentSample

__all__ = [
    "ARMS",
    "POSITIONS",
    "SECONDS",
    "STAGES",
    "CatalogLogCounts",
    "Gauges",
    "LogCounts",
    "Metrics",
    "RecentMetrics",
    "RecentSample",
]
