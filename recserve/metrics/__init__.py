"""Prometheus metrics: the collectors of a server, the engine's figures, and vLLM's names."""

from recserve.metrics.gauges import Gauges, SlateLogCounts
from recserve.metrics.metrics import ARMS, POSITIONS, SECONDS, STAGES, Metrics

__all__ = [
    "ARMS",
    "POSITIONS",
    "SECONDS",
    "STAGES",
    "Gauges",
    "Metrics",
    "SlateLogCounts",
]
