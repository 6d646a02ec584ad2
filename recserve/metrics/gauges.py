"""Figures of the engine that are read at scrape time, and the metrics of their health."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

BUILD_LABELS = ("version", "torch", "device", "isa")


class WatchedDrafts(Protocol):
    """Acceptance of a drafter's recent drafts; core/draft_policy.py implements it."""

    @property
    def acceptance(self) -> Sequence[float]:
        """By depth, the share of drafted levels that is accepted if the level above is."""
        ...

    @property
    def expected(self) -> float:
        """The gain that recent drafts are compared with."""
        ...

    @property
    def recent(self) -> float:
        """The mean gain of recent drafts."""
        ...

    @property
    def alarm(self) -> bool:
        """Whether recent drafts are far below the expectation or do not pay."""
        ...

    @property
    def paused(self) -> bool:
        """Whether requests decode without drafts."""
        ...


@dataclass
class SlateLogCounts:
    """Running figures of the slate log.

    Attributes:
        rows: Rows written so far, by `slates` and `outcomes`.
        dropped: Records that were not written, by `queue_full` and `write_failed`.
        bytes: Size of the files in the folder.
    """

    rows: dict[str, int] = field(default_factory=lambda: {"slates": 0, "outcomes": 0})
    dropped: dict[str, int] = field(default_factory=lambda: {"queue_full": 0, "write_failed": 0})
    bytes: int = 0


@dataclass(frozen=True)
class Gauges:
    """Engine figures that are read at scrape time.

    Attributes:
        queue_depth: Requests that wait for the engine.
        illegal_items: Items from a model that do not exist or were excluded. Always 0.
        kv_pages: Pages of the KV pool, by state.
        prefix_tokens: Prefix tokens, by whether the prefix cache held them.
        graph_steps: Text steps, by graph replay or by the reason why none was replayed.
        graph_searches: Item searches, by graph replay or by the reason why none was replayed.
        graph_seconds: Capture time of each CUDA graph, by bucket.
        graph_bytes: Device memory of each CUDA graph, by bucket.
        background: Precomputation requests that are waiting or running.
        running: Requests that the engine runs.
        build: Labels of `recserve_build_info`; empty before the engine is loaded.
        drafts: Acceptance of recent drafts, by drafter.
        slate_log: Figures of the slate log; None without one.
    """

    queue_depth: int = 0
    illegal_items: int = 0
    kv_pages: Mapping[str, int] = field(default_factory=dict)
    prefix_tokens: Mapping[str, int] = field(default_factory=dict)
    graph_steps: Mapping[str, int] = field(default_factory=dict)
    graph_searches: Mapping[str, int] = field(default_factory=dict)
    graph_seconds: Mapping[str, float] = field(default_factory=dict)
    graph_bytes: Mapping[str, int] = field(default_factory=dict)
    background: int = 0
    running: int = 0
    build: Mapping[str, str] = field(default_factory=dict)
    drafts: Mapping[str, WatchedDrafts] = field(default_factory=dict)
    slate_log: SlateLogCounts | None = None


def health_families(gauges: Gauges) -> Iterator[Metric]:
    """Yields the metrics of the build, of drafts and of the slate log."""
    build = GaugeMetricFamily(
        "recserve_build_info", "Versions of the running program; always 1", labels=BUILD_LABELS
    )
    if gauges.build:
        build.add_metric([gauges.build[label] for label in BUILD_LABELS], 1)
    yield build
    levels = GaugeMetricFamily(
        "recserve_draft_acceptance_ratio",
        "Share of recent drafted levels that is accepted if the level above is",
        labels=["drafter", "depth"],
    )
    for drafter, drafts in gauges.drafts.items():
        for depth, ratio in enumerate(drafts.acceptance, start=1):
            levels.add_metric([drafter, str(depth)], ratio)
    yield levels
    for name, text in (
        ("recent", "Mean gain of recent drafts: accepted tokens, or saved rounds of a slate"),
        ("expected", "Gain that recent drafts are compared with"),
        ("alarm", "1 while drafts are far below the expectation or do not pay"),
        ("paused", "1 while requests decode without drafts"),
    ):
        family = GaugeMetricFamily(f"recserve_draft_acceptance_{name}", text, labels=["drafter"])
        for drafter, drafts in gauges.drafts.items():
            family.add_metric([drafter], float(getattr(drafts, name)))
        yield family
    log = gauges.slate_log
    rows = CounterMetricFamily(
        "recserve_slate_log_rows", "Rows written to the slate log", labels=["kind"]
    )
    dropped = CounterMetricFamily(
        "recserve_slate_log_dropped", "Records that the slate log lost", labels=["reason"]
    )
    size = GaugeMetricFamily("recserve_slate_log_bytes", "Size of the slate log")
    if log is not None:
        for kind, count in log.rows.items():
            rows.add_metric([kind], count)
        for reason, count in log.dropped.items():
            dropped.add_metric([reason], count)
        size.add_metric([], log.bytes)
    yield from (rows, dropped, size)
