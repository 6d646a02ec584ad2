"""The text metrics under vLLM's names, so that tools and dashboards made for vLLM work.

The collector reads this server's own metrics at scrape time and renames them. vLLM's meanings hold:
lengths exclude the bonus token, and the prefix cache counts tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from recserve.metrics.gauges import Gauges


class Timing(Protocol):
    """Stages of one text in milliseconds; core/request.py implements it."""

    queue_ms: float
    prefill_ms: float
    total_ms: float
    preemptions: int


@dataclass(frozen=True)
class _Rename:
    """One metric under vLLM's name.

    Attributes:
        source: Name of this server's metric.
        target: vLLM's name.
        where: Label values that a sample must have; these labels are left out.
        labels: vLLM's names of further labels. Samples that differ in other labels are summed.
    """

    source: str
    target: str
    where: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


TOKENS = tuple(digit * 10**zeros for zeros in range(7) for digit in (1, 2, 5))
FEW = (1, 2, 5, 10, 20)
STEP_TOKENS = tuple(2**power for power in range(15))
POSITION = {"position": "position"}
RENAMES = (
    _Rename("recserve_first_token_seconds", "vllm:time_to_first_token_seconds"),
    _Rename("recserve_inter_token_seconds", "vllm:inter_token_latency_seconds"),
    _Rename("recserve_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    _Rename("recserve_text_seconds", "vllm:e2e_request_latency_seconds"),
    _Rename("recserve_text_queue_seconds", "vllm:request_queue_time_seconds"),
    _Rename(
        "recserve_texts_finished", "vllm:request_success", labels={"reason": "finished_reason"}
    ),
    _Rename("recserve_text_tokens", "vllm:prompt_tokens", {"kind": "prompt"}),
    _Rename("recserve_text_tokens", "vllm:generation_tokens", {"kind": "completion"}),
    _Rename("recserve_spec_drafts", "vllm:spec_decode_num_drafts"),
    _Rename("recserve_spec_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
    _Rename("recserve_spec_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
    _Rename(
        "recserve_spec_accepted_per_position",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        labels=POSITION,
    ),
)


class VllmTexts:
    """Histograms of texts that only vLLM has, for dashboards made for it."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, seconds: Sequence[float]
    ) -> None:
        """Registers the histograms.

        Args:
            registry: Where they are exported.
            model_name: Name of the language model.
            seconds: Buckets of times.
        """
        kinds = {
            "request_prompt_tokens": ("Tokens of a prompt", TOKENS),
            "request_generation_tokens": ("Tokens written for a request", TOKENS),
            "request_params_n": ("Texts that a request asks for", FEW),
            "request_params_max_tokens": ("Most tokens that a request allows", TOKENS),
            "request_max_num_generation_tokens": ("Tokens of a request's longest text", TOKENS),
            "request_inference_time_seconds": ("Time of a request in the engine", seconds),
            "request_prefill_time_seconds": ("Time of a request's prefill", seconds),
            "request_decode_time_seconds": ("Time of a request's decoding", seconds),
            "request_num_preemptions": ("Times that a request gave way to others", FEW),
        }
        labels = {"model_name": model_name, "engine": "0"}
        self._preemptions = Counter(
            "vllm:num_preemptions", "Times that texts gave way to others", labels, registry=registry
        ).labels(**labels)
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, labels, registry=registry, buckets=buckets
            ).labels(**labels)
            for name, (text, buckets) in kinds.items()
        }

    def observe(
        self, prompts: Sequence[int], written: Sequence[int], most: Sequence[int], timing: Timing
    ) -> None:
        """Counts one request.

        Args:
            prompts: Tokens of each prompt.
            written: Tokens of each text; as many for each prompt.
            most: Most tokens of each text.
            timing: Stages of the text that took longest.
        """
        inference = timing.total_ms - timing.queue_ms
        figures = {
            "request_prompt_tokens": sum(prompts),
            "request_generation_tokens": sum(written),
            "request_params_n": len(written) // len(prompts),
            "request_params_max_tokens": max(most),
            "request_max_num_generation_tokens": max(written),
            "request_inference_time_seconds": inference / 1e3,
            "request_prefill_time_seconds": timing.prefill_ms / 1e3,
            "request_decode_time_seconds": max(inference - timing.prefill_ms, 0.0) / 1e3,
            "request_num_preemptions": timing.preemptions,
        }
        for name, figure in figures.items():
            self._histograms[name].observe(figure)
        self._preemptions.inc(timing.preemptions)


class VllmCollector(Collector):
    """Exports metrics under vLLM's names.

    Attributes:
        sources: This server's metrics by name.
        engine: Returns the engine's figures; None before it is loaded.
        model_name: Name of the language model.
    """

    def __init__(
        self,
        sources: Mapping[str, Collector],
        engine: Callable[[], Gauges | None],
        model_name: str,
    ) -> None:
        self.sources, self.engine, self.model_name = sources, engine, model_name

    def describe(self) -> Iterable[Metric]:
        """Returns no metrics: their names are known to be free."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields vLLM's metrics."""
        gauges = self.engine()
        if gauges is None:
            return
        fixed = {"model_name": self.model_name, "engine": "0"}
        yield from _gauges(gauges, fixed)
        if gauges.step_tokens is not None:
            yield _steps(gauges.step_tokens, fixed)
        yield _refusals(self.sources["recserve_errors"], fixed)
        for rename in RENAMES:
            for family in self.sources[rename.source].collect():
                yield _rename(rename, family, fixed)


def _gauges(gauges: Gauges, fixed: Mapping[str, str]) -> Iterator[Metric]:
    pages, tokens = gauges.kv_pages, gauges.prefix_tokens
    usage = pages.get("used", 0) / max(sum(pages.values()), 1)
    for name, text, value in (
        ("num_requests_running", "Requests that the engine runs", gauges.running),
        ("num_requests_waiting", "Requests waiting for the engine", gauges.queue_depth),
        ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it", usage),
    ):
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(fixed))
        family.add_metric(list(fixed.values()), value)
        yield family
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests waiting for the engine, by reason",
        labels=[*fixed, "reason"],
    )
    waiting.add_metric([*fixed.values(), "capacity"], gauges.queue_depth)
    waiting.add_metric([*fixed.values(), "deferred"], 0)
    yield waiting
    size = {"kv_cache_size_tokens": str(gauges.slots_total)}
    if gauges.context:
        size["kv_cache_max_concurrency"] = f"{gauges.slots_total / gauges.context:.2f}"
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "Size of the KV cache; always 1", labels=["engine", *size]
    )
    info.add_metric([fixed["engine"], *size.values()], 1)
    yield info
    for name, text, count in (
        ("queries", "Prompt tokens looked up in the prefix cache", sum(tokens.values())),
        ("hits", "Prompt tokens found in the prefix cache", tokens.get("hit", 0)),
    ):
        counter = CounterMetricFamily(f"vllm:prefix_cache_{name}", text, labels=list(fixed))
        counter.add_metric(list(fixed.values()), count)
        yield counter


def _steps(counts: Mapping[int, int], fixed: Mapping[str, str]) -> Metric:
    """Returns the steps of the language model by their number of tokens."""
    family = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Tokens of a step of the engine", labels=list(fixed)
    )
    buckets = [
        (bound, sum(count for tokens, count in counts.items() if tokens <= float(bound)))
        for bound in (*[f"{bound}.0" for bound in STEP_TOKENS], "+Inf")
    ]
    total = sum(tokens * count for tokens, count in counts.items())
    family.add_metric(list(fixed.values()), buckets, total)
    return family


def _refusals(errors: Collector, fixed: Mapping[str, str]) -> Metric:
    """Returns the requests that a full queue refused."""
    counter = CounterMetricFamily(
        "vllm:admission_rejections", "Requests that a full queue refused", labels=list(fixed)
    )
    samples = [sample for family in errors.collect() for sample in family.samples]
    refused = [one.value for one in samples if one.labels.get("code") == "queue_full"]
    counter.add_metric(list(fixed.values()), sum(refused[:1]))
    return counter


def _rename(rename: _Rename, family: Metric, fixed: Mapping[str, str]) -> Metric:
    """Returns a family under its new name, with samples of equal labels summed."""
    found = Metric(rename.target, family.documentation, family.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        if any(sample.labels[name] != value for name, value in rename.where.items()):
            continue
        own = {new: sample.labels[old] for old, new in rename.labels.items()}
        bucket = {"le": sample.labels["le"]} if "le" in sample.labels else {}
        name = rename.target + sample.name.removeprefix(rename.source)
        key = name, tuple({**fixed, **own, **bucket}.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    if not sums and not rename.labels:
        sums[f"{rename.target}_total", tuple(fixed.items())] = 0.0
    for (name, labels), value in sums.items():
        found.add_sample(name, dict(labels), value)
    return found
