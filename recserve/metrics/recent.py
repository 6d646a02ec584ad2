"""The last ten minutes of a server: a sample of its metrics every few seconds."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.registry import Collector

from recserve.metrics.gauges import Gauges
from recserve.metrics.metrics import Metrics

log = logging.getLogger(__name__)
EVERY_S = 5.0
KEPT_S = 600.0
MODEL_ROUTE = re.compile("recommend|rank|infer|completions|scoring|embeddings")


@dataclass(frozen=True)
class RecentSample:
    """What happened since the sample before, or since the start; gauges are those at its end.

    Attributes:
        at_s: Unix time of its end.
        seconds: Its length.
        requests: Ended requests of the routes that ask a model.
        p50_ms: Their median latency, interpolated between bounds of the histogram; None without.
        p99_ms: Their 99th percentile.
        errors: Error responses of all routes by code.
        tokens: Completion tokens of texts.
        prefix_tokens: Prefix tokens of requests.
        cached_tokens: Those that the prefix cache held.
        queue_depth: Requests waiting for the engine.
        running: Requests that the engine runs.
    """

    at_s: float
    seconds: float
    requests: int
    p50_ms: float | None
    p99_ms: float | None
    errors: Mapping[str, int]
    tokens: int
    prefix_tokens: int
    cached_tokens: int
    queue_depth: int
    running: int


@dataclass(frozen=True)
class _Totals:
    """Counters since the start.

    Attributes:
        at_s: Unix time.
        latencies: Requests of model routes by the upper bound of their latency in seconds, each
            with those of all lower bounds.
        errors: Error responses by code.
        tokens: Completion tokens.
        prefix_tokens: Prefix tokens.
        cached_tokens: Those that the prefix cache held.
    """

    at_s: float
    latencies: Counter[float] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prefix_tokens: int = 0
    cached_tokens: int = 0


class RecentMetrics:
    """Samples of the last ten minutes, oldest first. A thread of its own adds them.

    Requests pay nothing for it: a sample reads the counters that `/metrics` exports.
    """

    def __init__(self, metrics: Metrics, gauges: Callable[[], Gauges | None]) -> None:
        """Takes no sample yet.

        Args:
            metrics: The server's metrics.
            gauges: Returns the engine's figures; None before the engine is loaded.
        """
        self._metrics, self._gauges = metrics, gauges
        self._samples: deque[RecentSample] = deque(maxlen=round(KEPT_S / EVERY_S))
        self._before = _Totals(time.time())
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def samples(self) -> list[RecentSample]:
        """The samples."""
        with self._lock:
            return list(self._samples)

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="recent-metrics", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()

    def take(self) -> None:
        """Adds a sample."""
        with self._lock:
            figures = self._gauges() or Gauges()
            now, before = self._read(figures), self._before
            self._before = now
            counts = [
                (bound, now.latencies[bound] - before.latencies[bound])
                for bound in sorted(now.latencies)
            ]
            self._samples.append(
                RecentSample(
                    at_s=now.at_s,
                    seconds=now.at_s - before.at_s,
                    requests=counts[-1][1] if counts else 0,
                    p50_ms=_quantile_ms(counts, 0.5),
                    p99_ms=_quantile_ms(counts, 0.99),
                    errors=dict(now.errors - before.errors),
                    # The engine's own counters begin again with each bundle.
                    tokens=now.tokens - before.tokens,
                    prefix_tokens=max(0, now.prefix_tokens - before.prefix_tokens),
                    cached_tokens=max(0, now.cached_tokens - before.cached_tokens),
                    queue_depth=figures.queue_depth,
                    running=figures.running,
                )
            )

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                self.take()
            except Exception:  # a sample is lost, not the thread
                log.exception("the metrics of the last seconds could not be read")

    def _read(self, figures: Gauges) -> _Totals:
        latencies: Counter[float] = Counter()
        for labels, value in _values(self._metrics.request_seconds, "_bucket"):
            if MODEL_ROUTE.search(labels["route"]):
                latencies[float(labels["le"])] += value
        errors = {labels["code"]: value for labels, value in _values(self._metrics.errors)}
        tokens = {labels["kind"]: value for labels, value in _values(self._metrics.tokens)}
        return _Totals(
            at_s=time.time(),
            latencies=latencies,
            errors=Counter(errors),
            tokens=tokens["completion"],
            prefix_tokens=sum(figures.prefix_tokens.values()),
            cached_tokens=figures.prefix_tokens.get("hit", 0),
        )


def _values(collector: Collector, suffix: str = "_total") -> Iterator[tuple[dict[str, str], int]]:
    """Yields labels and number of each sample whose name ends so."""
    for family in collector.collect():
        for sample in family.samples:
            if sample.name.endswith(suffix):
                yield sample.labels, int(sample.value)


def _quantile_ms(counts: Sequence[tuple[float, int]], share: float) -> float | None:
    """Returns a quantile by linear interpolation, as Prometheus does; None without requests.

    Args:
        counts: Upper bounds in seconds, ascending, with the requests up to each of them.
        share: 0.99 for the 99th percentile.
    """
    if not counts or not counts[-1][1]:
        return None
    wanted, low, below = share * counts[-1][1], 0.0, 0
    for bound, count in counts:
        if count >= wanted:
            # The last bound is infinite.
            inside = (wanted - below) / (count - below) if math.isfinite(bound) else 0.0
            return 1e3 * (low + inside * (bound - low if inside else 0.0))
        low, below = bound, count
    return 1e3 * low
