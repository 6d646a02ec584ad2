"""Figures of the engine that are read at scrape time: one table of their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

BUILD_LABELS = ("version", "torch", "device", "isa")
Samples = Iterable[tuple[Sequence[str], float]]


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
class LogCounts:
    """Running figures of a log of Parquet files.

    Attributes:
        rows: Rows written so far, by kind of files.
        dropped: Records that were not written, by `queue_full` and `write_failed`.
        bytes: Size of the files in the folder.
    """

    rows: dict[str, int]
    dropped: dict[str, int] = field(default_factory=lambda: {"queue_full": 0, "write_failed": 0})
    bytes: int = 0


@dataclass(frozen=True)
class CatalogLogCounts:
    """Figures of a log of item changes that several servers share.

    Attributes:
        lag_s: Time since the log was last read to its end.
        lag_positions: Known positions of the log that are not applied.
        losses: How often the log had lost positions that were applied here.
        conflicts: How often another server took the position of a change of this one.
    """

    lag_s: float
    lag_positions: int
    losses: int
    conflicts: int


def _number(value: float) -> Samples:
    return [((), value)]


def _by_label(value: Mapping[str, float]) -> Samples:
    return (((label,), number) for label, number in value.items())


def _build(value: Mapping[str, str]) -> Samples:
    return [([value[label] for label in BUILD_LABELS], 1)] if value else ()


def _by_depth(drafts: Mapping[str, WatchedDrafts]) -> Samples:
    for drafter, one in drafts.items():
        for depth, ratio in enumerate(one.acceptance, start=1):
            yield (drafter, str(depth)), ratio


def _by_drafter(read: Callable[[WatchedDrafts], float]) -> Callable[[Any], Samples]:
    return lambda drafts: (((drafter,), float(read(one))) for drafter, one in drafts.items())


def _of_log(read: Callable[[Any], Samples]) -> Callable[[Any], Samples]:
    return lambda log: () if log is None else read(log)


@dataclass(frozen=True)
class Row:
    """A metric in the table.

    Attributes:
        name: Name of the metric. A counter's samples get the suffix `_total`.
        text: Help text.
        labels: Names of the labels.
        samples: Returns label values and number of each sample of the figure.
        counts: Whether it is a counter; else it is a gauge.
    """

    name: str
    text: str
    labels: Sequence[str] = ()
    samples: Callable[[Any], Samples] = _number
    counts: bool = False

    def family(self, figure: Any) -> Metric:
        """Returns the metric of a figure."""
        kind = CounterMetricFamily if self.counts else GaugeMetricFamily
        family = kind(self.name, self.text, labels=self.labels)
        for labels, number in self.samples(figure):
            family.add_metric(labels, number)
        return family


def _figure(*rows: Row, default: Any = 0) -> Any:
    """Returns a field of Gauges with its metrics."""
    return field(default=default, metadata={"rows": rows})


def _figures(*rows: Row) -> Any:
    """Returns a field of Gauges with a figure by label, and its metrics."""
    return field(default_factory=dict, metadata={"rows": rows})


def _gauge(name: str, text: str) -> Any:
    return _figure(Row(name, text))


def _gauges(name: str, text: str, label: str) -> Any:
    return _figures(Row(name, text, (label,), _by_label))


def _counters(name: str, text: str, label: str) -> Any:
    return _figures(Row(name, text, (label,), _by_label, counts=True))


def _parquet_log(name: str, records: str, rows: Row) -> Any:
    """Returns a field of Gauges with the metrics of a log of Parquet files.

    Args:
        name: `slate_log` or `event_log`.
        records: What the log takes, for the help text.
        rows: The metric of the written rows.
    """
    log = name.replace("_", " ")
    dropped = Row(
        f"recserve_{name}_dropped",
        f"{records} that the {log} lost",
        ("reason",),
        _of_log(lambda log: _by_label(log.dropped)),
        counts=True,
    )
    size = Row(
        f"recserve_{name}_bytes",
        f"Size of the {log}",
        samples=_of_log(lambda log: _number(log.bytes)),
    )
    return _figure(rows, dropped, size, default=None)


@dataclass(frozen=True)
class Gauges:
    """The table of the engine's metrics: each field is a figure, with its metrics.

    A field has the name of the engine's statistic that it shows (`EngineStats`), which is all that
    a new metric needs.

    Attributes:
        illegal_items: Items from a model that do not exist or were excluded. Always 0.
        kv_pages: Pages of the KV pool, by state.
        prefix_tokens: Prefix tokens, by whether the prefix cache held them.
        slots_total: Tokens that the KV pool holds, for vLLM's names.
        context: Tokens of the language model's context, for vLLM's names.
        step_tokens: Steps by their number of tokens, for vLLM's names; None if they are not
            counted.
        build: Labels of `recserve_build_info`; empty before the engine is loaded.
        slate_log: Figures of the slate log; None without one.
        event_log: Figures of the event log; None without one.
        catalog_log: Figures of a shared log of item changes; None without one.
    """

    queue_depth: int = _gauge("recserve_queue_depth", "Requests waiting for the engine")
    running: int = _gauge("recserve_requests_running", "Requests that the engine runs")
    background: int = _gauge(
        "recserve_background_depth", "Prefixes and drafts waiting to be precomputed"
    )
    kv_pages: Mapping[str, int] = _gauges("recserve_kv_pages", "Pages of the KV pool", "state")
    slots_total: int = _figure()
    context: int = _figure()
    step_tokens: Mapping[int, int] | None = _figure(default=None)
    prefix_tokens: Mapping[str, int] = _counters(
        "recserve_prefix_cache_tokens",
        "Prefix tokens by whether the prefix cache held them",
        "result",
    )
    illegal_items: int = _figure(
        Row(
            "recserve_illegal_items",
            "Items from a model that do not exist or were excluded; always 0",
            counts=True,
        )
    )
    graph_steps: Mapping[str, int] = _counters(
        "recserve_graph_steps",
        "Text steps replayed as a CUDA graph, or the reason why not",
        "result",
    )
    graph_drafts: Mapping[str, int] = _counters(
        "recserve_graph_drafts",
        "Drafts of text replayed as a CUDA graph, or the reason why not",
        "result",
    )
    graph_searches: Mapping[str, int] = _counters(
        "recserve_graph_searches",
        "Searches for items replayed as a CUDA graph, or the reason why not",
        "result",
    )
    graph_prefills: Mapping[str, int] = _counters(
        "recserve_graph_prefills",
        "Forward passes with prefixes alone replayed as a CUDA graph, or the reason why not",
        "result",
    )
    graph_seconds: Mapping[str, float] = _gauges(
        "recserve_graph_record_seconds", "Seconds that capturing a CUDA graph took", "bucket"
    )
    graph_bytes: Mapping[str, int] = _gauges(
        "recserve_graph_record_bytes", "Device memory of a captured CUDA graph, in bytes", "bucket"
    )
    unrecorded: Sequence[str] = _figure(
        Row(
            "recserve_graph_missing",
            "CUDA graphs that were not captured, as the log explains; always 1",
            ("bucket",),
            lambda names: (((name,), 1) for name in names),
        ),
        default=(),
    )
    build: Mapping[str, str] = _figures(
        Row(
            "recserve_build_info",
            "Versions of the running program; always 1",
            BUILD_LABELS,
            _build,
        )
    )
    drafts: Mapping[str, WatchedDrafts] = _figures(
        Row(
            "recserve_draft_acceptance_ratio",
            "Share of recent drafted levels that is accepted if the level above is",
            ("drafter", "depth"),
            _by_depth,
        ),
        Row(
            "recserve_draft_acceptance_recent",
            "Mean gain of recent drafts: accepted tokens, or saved rounds of a slate",
            ("drafter",),
            _by_drafter(lambda drafts: drafts.recent),
        ),
        Row(
            "recserve_draft_acceptance_expected",
            "Gain that recent drafts are compared with",
            ("drafter",),
            _by_drafter(lambda drafts: drafts.expected),
        ),
        Row(
            "recserve_draft_acceptance_alarm",
            "1 while drafts are far below the expectation or do not pay",
            ("drafter",),
            _by_drafter(lambda drafts: drafts.alarm),
        ),
        Row(
            "recserve_draft_acceptance_paused",
            "1 while requests decode without drafts",
            ("drafter",),
            _by_drafter(lambda drafts: drafts.paused),
        ),
    )
    slate_log: LogCounts | None = _parquet_log(
        "slate_log",
        "Records",
        Row(
            "recserve_slate_log_rows",
            "Rows written to the slate log",
            ("kind",),
            _of_log(lambda log: _by_label(log.rows)),
            counts=True,
        ),
    )
    event_log: LogCounts | None = _parquet_log(
        "event_log",
        "Events and corrections",
        Row(
            "recserve_event_log_rows",
            "Events and corrections written to the event log",
            samples=_of_log(lambda log: _number(log.rows["events"])),
            counts=True,
        ),
    )
    catalog_log: CatalogLogCounts | None = _figure(
        Row(
            "recserve_catalog_lag_seconds",
            "Time since this server last read the shared log of item changes to its end",
            samples=_of_log(lambda log: _number(log.lag_s)),
        ),
        Row(
            "recserve_catalog_lag_positions",
            "Change sets of items in the shared log that this server has not applied",
            samples=_of_log(lambda log: _number(log.lag_positions)),
        ),
        Row(
            "recserve_catalog_losses",
            "Times that the shared log had lost change sets which this server had applied",
            samples=_of_log(lambda log: _number(log.losses)),
            counts=True,
        ),
        Row(
            "recserve_catalog_conflicts",
            "Times that another server was faster to change items, so that this one tried again",
            samples=_of_log(lambda log: _number(log.conflicts)),
            counts=True,
        ),
        default=None,
    )

    @staticmethod
    def of(stats: object, **derived: Any) -> Gauges:
        """Returns the figures that an engine's statistics have under the same name.

        Args:
            stats: The engine's statistics.
            derived: Figures that are computed from them, or come from elsewhere.
        """
        names = [one.name for one in fields(Gauges) if one.name not in derived]
        same = {name: getattr(stats, name) for name in names if hasattr(stats, name)}
        return Gauges(**same, **derived)

    def families(self) -> Iterator[Metric]:
        """Yields all metrics."""
        for one in fields(self):
            for row in one.metadata["rows"]:
                yield row.family(getattr(self, one.name))
