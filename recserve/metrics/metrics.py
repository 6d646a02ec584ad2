"""Prometheus collectors of one server. The values of every label come from a closed set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from recserve.metrics.gauges import Gauges
from recserve.metrics.process import add_process_metrics
from recserve.metrics.vllm import VllmCollector, VllmTexts

FINISH_REASONS = ("stop", "length", "abort")
STAGES = ("queue", "features", "prefill", "draft", "verify", "total")
ARMS = ("none",)
SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0),
)
SWAP_RESULTS = ("loaded", "refused")
# Codes of `degraded` in answers.
DEGRADED = (
    *("cold_start", "hurried", "history_unavailable", "history_damaged", "fewer_than_k"),
    "length_penalty",
    *("unknown_history_items", "unknown_excluded_items", "unknown_filter_values", "no_model_items"),
    *("seen_within_s_ignored", "duplicate_candidates", "shown_at_ignored", "features_ignored"),
    *("at_least_unmet", "no_recommender", "deadline_passed", "shown_unavailable"),
    "unknown_shown_items",
)
# Tokens at this draft position or deeper count at the last one, POSITIONS - 1.
POSITIONS = 32
ROUNDS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)


class Drafted(Protocol):
    """Draft counts of one text request; speculation/completion.py implements it."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    per_position: list[int]


class _EngineCollector(Collector):
    """Reads the engine's figures at scrape time, so that the engine loop exports nothing."""

    def __init__(self, read: Callable[[], Gauges | None]) -> None:
        self.read = read

    def describe(self) -> Iterable[Metric]:
        return Gauges().families()

    def collect(self) -> Iterator[Metric]:
        gauges = self.read()
        if gauges is not None:
            yield from gauges.families()


class Metrics:
    """The collectors of one server. Unknown routes and reasons count as `other`.

    Attributes:
        registry: Registry of all collectors.
        routes: Path templates that are known. The server sets them after adding its routes.
        strategies: Names of decoding strategies. Any other name counts as `none`.
        arms: Labels of the arms of experiments. Any other label counts as `none`.
        reasons: Failure reasons that are counted by name.
        codes: Codes of errors that are counted by name.
        vllm_texts: Histograms that only vLLM has; None without its names.
    """

    def __init__(
        self,
        strategies: Iterable[str],
        reasons: Iterable[str],
        engine: Callable[[], Gauges | None],
        vllm_model: str | None = None,
        codes: Iterable[str] = (),
    ) -> None:
        """Registers all collectors.

        Args:
            strategies: Values of the label `strategy`.
            reasons: Values of the label `reason` of failures.
            engine: Returns the engine's figures; None before the engine is loaded.
            vllm_model: Name of the language model under which the text metrics are exported with
                vLLM's names too. None leaves vLLM's names out.
            codes: Values of the label `code` of errors.
        """
        self.registry = CollectorRegistry()
        self.routes: frozenset[str] = frozenset()
        self.strategies = frozenset(strategies)
        self.arms: frozenset[str] = frozenset()
        self.reasons = frozenset(reasons)
        self.codes = frozenset(codes)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self.request_seconds = histogram(
            "recserve_request_seconds",
            "Time from the first byte of a request to the last byte of its response",
            ["route", "strategy", "arm"],
        )
        self.stage_seconds = histogram(
            "recserve_stage_seconds", "Time a request spent in a stage", ["stage"]
        )
        self.failed = counter(
            "recserve_requests_failed", "Requests without a successful response", ["reason"]
        )
        self.errors = counter("recserve_errors", "The same requests by code of the error", ["code"])
        self.rounds = histogram(
            "recserve_recommend_rounds",
            "Forward passes over token trees per recommendation",
            buckets=ROUNDS,
        )
        self._degraded = counter(
            "recserve_degraded_answers",
            "Recommendations and rankings that are less than what was asked, by code",
            ["code"],
        )
        self.bundle_swaps = counter(
            "recserve_bundle_swaps", "Replacements of the served bundle, by result", ["result"]
        )
        self.tokens = counter("recserve_text_tokens", "Prompt and completion tokens", ["kind"])
        self.first_token = histogram(
            "recserve_first_token_seconds",
            "Time from the first byte of a request to the first piece of its text",
        )
        self.inter_token, self.token_seconds, self.text_seconds, self.text_queue = (
            histogram(f"recserve_{name}_seconds", text)
            for name, text in (
                ("inter_token", "Time between two consecutive pieces of one text"),
                ("time_per_output_token", "Mean time per token of one text, after its first piece"),
                ("text", "Time from the first byte of a request to the end of its last text"),
                ("text_queue", "Time that a text request waited for the engine"),
            )
        )
        self.finished = counter("recserve_texts_finished", "Ended texts", ["reason"])
        by_depth = ["drafter", "position"]
        self._drafts = {
            name: counter(f"recserve_spec_{name}", text, labels)
            for name, text, labels in (
                ("drafts", "Drafts that were verified", ["drafter"]),
                ("draft_tokens", "Tokens in those drafts", ["drafter"]),
                ("accepted_tokens", "Accepted tokens of those drafts", ["drafter"]),
                ("accepted_per_position", "Accepted tokens by position in the draft", by_depth),
            )
        }
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        self._export_at_zero()
        self.registry.register(_EngineCollector(engine))
        add_process_metrics(self.registry)
        self.vllm_texts: VllmTexts | None = None
        if vllm_model is not None:
            self.vllm_texts = VllmTexts(self.registry, vllm_model, SECONDS)
            texts = self._text_collectors()
            self.registry.register(VllmCollector(texts, engine, vllm_model))

    def _export_at_zero(self) -> None:
        """Exports every value of a closed label from the start, for alert rules to refer to."""
        for counter, values in (
            (self.failed, self.reasons),
            (self.errors, self.codes),
            (self._degraded, DEGRADED),
            (self.bundle_swaps, SWAP_RESULTS),
            (self.finished, FINISH_REASONS),
            (self.tokens, ("prompt", "completion")),
        ):
            for value in values:
                counter.labels(value)

    def request(self, route: str | None, strategy: str, seconds: float, arm: str = ARMS[0]) -> None:
        """Counts one request.

        Args:
            route: Path template, or None if no route matched.
            strategy: Decoding strategy, or `none` if no strategy answered.
            seconds: Time from the first byte of the request to the last byte of the response.
            arm: Experiment and arm, or `none`.
        """
        known = route if route in self.routes else "other"
        used = strategy if strategy in self.strategies else "none"
        drawn = arm if arm in self.arms else ARMS[0]
        self.request_seconds.labels(known, used, drawn).observe(seconds)

    def failure(self, reason: str, code: str) -> None:
        """Counts one failed request by the reason and the code of its error."""
        self.failed.labels(reason if reason in self.reasons else "other").inc()
        self.errors.labels(code if code in self.codes else "other").inc()

    def count_degraded(self, codes: Iterable[str]) -> None:
        """Counts the codes of `degraded` of one answer."""
        for code in codes:
            self._degraded.labels(code if code in DEGRADED else "other").inc()

    def stages(self, milliseconds: Mapping[str, float]) -> None:
        """Counts the stage times of one successful request, in milliseconds by stage."""
        for stage, histogram in self._stages.items():
            histogram.observe(milliseconds[stage] / 1e3)

    def text_tokens(self, prompt: int, written: int) -> None:
        """Counts prompt and completion tokens of one text request."""
        self.tokens.labels("prompt").inc(prompt)
        self.tokens.labels("completion").inc(written)

    def texts_ended(
        self, reasons: Sequence[str | None], seconds: float, queue_seconds: float
    ) -> None:
        """Counts one text request.

        Args:
            reasons: Finish reason of each text; None if the text was cancelled or failed.
            seconds: Time from the first byte of the request to the end of its last text.
            queue_seconds: Time that the request waited for the engine.
        """
        for reason in reasons:
            self.finished.labels(reason if reason in FINISH_REASONS else "abort").inc()
        if None not in reasons:
            self.text_seconds.observe(seconds)
            self.text_queue.observe(queue_seconds)

    def count_drafts(self, drafter: str, counts: Drafted) -> None:
        """Counts the drafts of one text request. `drafter` is the name of a loaded drafter."""
        if not counts.num_drafts:
            return
        self._drafts["drafts"].labels(drafter).inc(counts.num_drafts)
        self._drafts["draft_tokens"].labels(drafter).inc(counts.num_draft_tokens)
        self._drafts["accepted_tokens"].labels(drafter).inc(counts.num_accepted_tokens)
        by_position = self._drafts["accepted_per_position"]
        for place, accepted in enumerate(counts.per_position):
            by_position.labels(drafter, min(place, POSITIONS - 1)).inc(accepted)

    def _text_collectors(self) -> dict[str, Collector]:
        """Returns the collectors that vLLM has too, by the name of their metric."""
        own = (self.first_token, self.inter_token, self.token_seconds, self.text_seconds)
        counters = (
            self.text_queue,
            self.finished,
            self.tokens,
            *self._drafts.values(),
            self.errors,
        )
        return {family.name: each for each in (*own, *counters) for family in each.describe()}

    def page(self, openmetrics: bool = False) -> bytes:
        """Returns all collectors in Prometheus' text format, or in that of OpenMetrics."""
        if openmetrics:
            return generate_openmetrics(self.registry)  # type: ignore[no-untyped-call, no-any-return]
        return generate_latest(self.registry)
