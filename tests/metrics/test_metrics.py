"""The metrics page: what it holds, vLLM's names, and that its number of series never grows."""

import random
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from recserve.core.draft_policy import DraftHealth
from recserve.core.request import Timing
from recserve.metrics import POSITIONS, Gauges, Metrics
from recserve.metrics.gauges import LogCounts
from recserve.speculation.completion import SpeculationCounts

PAGES = Path(__file__).parent / "pages"
GAUGES = Gauges(
    queue_depth=3,
    running=2,
    kv_pages={"free": 6, "cached": 2, "used": 2},
    prefix_tokens={"hit": 30, "miss": 10},
    build={"version": "1", "torch": "2", "device": "cpu", "isa": "avx2"},
    drafts={"ngram": DraftHealth((0.75, 0.5), 1.2, 1.4, True, False)},
    slate_log=LogCounts({"slates": 4}, {"queue_full": 1}, 99),
)


# Every figure of the engine, and its page; with the names, labels and texts that dashboards read.
FULL = Gauges(
    queue_depth=3,
    kv_pages={"free": 6, "cached": 2, "used": 2},
    prefix_tokens={"hit": 30, "miss": 10},
    graph_steps={"replayed": 7, "size": 1},
    graph_drafts={"replayed": 6},
    graph_searches={"replayed": 5},
    graph_prefills={"replayed": 3},
    graph_seconds={"4x2": 0.5},
    graph_bytes={"4x2": 1024},
    unrecorded=["9x2"],
    background=4,
    running=2,
    build={"version": "1", "torch": "2", "device": "cpu", "isa": "avx2"},
    drafts={"ngram": DraftHealth((0.75, 0.5), 1.2, 1.4, True, False)},
    slate_log=LogCounts({"slates": 4, "outcomes": 2}, {"queue_full": 1, "write_failed": 0}, 99),
)


@pytest.mark.parametrize(("name", "gauges"), [("full", FULL), ("empty", Gauges())])
def test_the_engines_page_stays_as_it_is(name, gauges):
    page = Metrics((), (), lambda: gauges).page().decode()
    start, end = page.index("# HELP recserve_queue_depth"), page.index("# HELP process_")
    assert page[start:end] == (PAGES / f"engine_{name}.txt").read_text()


def test_a_new_figure_needs_its_statistic_and_its_row_alone():
    """Each statistic under the name of a field is shown; a field without one keeps its default."""
    stats = SimpleNamespace(queue_depth=5, graph_steps={"drawn": 2}, pages_free=3)
    gauges = Gauges.of(stats, illegal_items=1)
    assert gauges == Gauges(queue_depth=5, graph_steps={"drawn": 2}, illegal_items=1)
    page = Metrics((), (), lambda: gauges).page().decode()
    assert 'recserve_graph_steps_total{result="drawn"} 2.0' in page


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.page().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(found, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def served(vllm_model: str | None = None) -> Metrics:
    metrics = Metrics(("beam",), ("invalid", "other"), lambda: GAUGES, vllm_model, ("other",))
    metrics.routes = frozenset({"/v1/completions", "/v1/recommend"})
    counts = SpeculationCounts()
    for accepted in (2, 0, 3):
        counts.add(4, accepted)
    metrics.count_drafts("ngram", counts)
    metrics.count_drafts("suffix", counts)
    metrics.text_tokens(7, 11)
    metrics.count_degraded(["cold_start", "fewer_than_k"])
    metrics.count_degraded(["a code of an arm's server"])
    metrics.first_token.observe(0.02)
    metrics.inter_token.observe(0.004)
    metrics.token_seconds.observe(0.003)
    metrics.texts_ended(["stop", "length"], 0.5, 0.1)
    metrics.texts_ended([None], 9.0, 0.1)
    return metrics


@pytest.mark.parametrize("depth", [1, POSITIONS - 1, POSITIONS, POSITIONS + 1, 70])
def test_positions_of_deep_drafts_share_the_last_series(depth):
    metrics = Metrics(("beam",), (), lambda: GAUGES)
    counts = SpeculationCounts()
    for accepted in range(depth + 1):
        counts.add(depth, accepted)
    metrics.count_drafts("ngram", counts)
    found = {
        int(dict(labels)["position"]): count
        for (series, labels), count in samples(metrics).items()
        if series == "recserve_spec_accepted_per_position_total" and count
    }
    wanted = dict.fromkeys(range(min(depth, POSITIONS)), 0.0)
    for place in range(depth):
        wanted[min(place, POSITIONS - 1)] += depth - place
    assert found == wanted


def test_what_the_page_holds():
    found = samples(served())
    assert value(found, "recserve_requests_running") == 2
    build = {"version": "1", "torch": "2", "device": "cpu", "isa": "avx2"}
    assert value(found, "recserve_build_info", **build) == 1
    assert value(found, "process_resident_memory_bytes") > 1e6
    assert value(found, "process_open_fds") > 2 and value(found, "recserve_process_threads") >= 1
    ended = {r: value(found, "recserve_texts_finished_total", reason=r) for r in ("stop", "abort")}
    assert ended == {"stop": 1, "abort": 1}
    codes = ("cold_start", "fewer_than_k", "hurried", "other")
    less = [value(found, "recserve_degraded_answers_total", code=code) for code in codes]
    assert less == [1, 1, 0, 1]
    assert value(found, "recserve_text_seconds_sum") == 0.5  # not that of the cancelled text
    levels = [
        value(found, "recserve_draft_acceptance_ratio", drafter="ngram", depth=d) for d in "12"
    ]
    assert levels == [0.75, 0.5]
    assert value(found, "recserve_draft_acceptance_alarm", drafter="ngram") == 1
    assert value(found, "recserve_slate_log_dropped_total", reason="queue_full") == 1
    assert not any(name.startswith("vllm:") for name, _ in found)


def test_vllms_names_mean_the_same():
    found = samples(served("story"))
    fixed = {"model_name": "story", "engine": "0"}

    def of(name: str, **labels: str) -> float:
        return value(found, f"vllm:{name}", **fixed, **labels)

    assert (of("num_requests_running"), of("num_requests_waiting")) == (2, 3)
    assert of("kv_cache_usage_perc") == pytest.approx(0.2)
    assert (of("prefix_cache_queries_total"), of("prefix_cache_hits_total")) == (40, 30)
    for name, total in (
        *(("time_to_first_token_seconds", 0.02), ("inter_token_latency_seconds", 0.004)),
        *(("request_time_per_output_token_seconds", 0.003), ("e2e_request_latency_seconds", 0.5)),
        ("request_queue_time_seconds", 0.1),
    ):
        assert of(f"{name}_sum") == pytest.approx(total) and of(f"{name}_count") == 1
        assert of(f"{name}_bucket", le="+Inf") == 1
    ended = [of("request_success_total", finished_reason=r) for r in ("stop", "length", "abort")]
    assert ended == [1, 1, 1]
    assert (of("prompt_tokens_total"), of("generation_tokens_total")) == (7, 11)
    # Two drafters with three drafts each, summed.
    assert of("spec_decode_num_drafts_total") == 6
    assert of("spec_decode_num_draft_tokens_total") == 24
    assert of("spec_decode_num_accepted_tokens_total") == 10
    places = [of("spec_decode_num_accepted_tokens_per_pos_total", position=p) for p in "012"]
    assert places == [4, 4, 2]


def test_vllms_histograms_count_each_request():
    metrics, draw = served("story"), random.Random(1)
    texts = metrics.vllm_texts
    assert texts is not None
    sums = dict.fromkeys(("prompt", "generation", "n", "max", "inference", "preempted"), 0.0)
    for _ in range(20):
        prompts = [draw.randrange(1, 500) for _ in range(draw.randrange(1, 4))]
        n, queue_ms, total_ms = draw.choice([1, 3]), draw.random(), draw.random() + 3
        written = [draw.randrange(300) for _ in range(len(prompts) * n)]
        most = [max(written)] * len(written)
        timing = Timing(queue_ms=queue_ms, total_ms=total_ms, preemptions=draw.randrange(3))
        texts.observe(prompts, written, most, timing)
        sums["prompt"] += sum(prompts)
        sums["generation"] += sum(written)
        sums["n"] += n
        sums["max"] += most[0]
        sums["inference"] += (timing.total_ms - timing.queue_ms) / 1e3
        sums["preempted"] += timing.preemptions
    found, fixed = samples(metrics), {"model_name": "story", "engine": "0"}
    names = {
        **{"prompt": "request_prompt_tokens", "generation": "request_generation_tokens"},
        **{"n": "request_params_n", "max": "request_params_max_tokens"},
        **{"inference": "request_inference_time_seconds", "preempted": "request_num_preemptions"},
    }
    for name, family in names.items():
        assert value(found, f"vllm:{family}_sum", **fixed) == pytest.approx(sums[name])
        assert value(found, f"vllm:{family}_count", **fixed) == 20
    assert value(found, "vllm:num_preemptions_total", **fixed) == sums["preempted"]


def test_vllms_histogram_of_steps_counts_each_step():
    draw = random.Random(2)
    counts = {draw.randrange(1, 40_000): draw.randrange(1, 9) for _ in range(50)}
    metrics = Metrics((), (), lambda: Gauges(step_tokens=counts), "story")
    found, fixed = samples(metrics), {"model_name": "story", "engine": "0"}
    name = "vllm:iteration_tokens_total"
    steps = [tokens for tokens, count in counts.items() for _ in range(count)]
    assert value(found, f"{name}_sum", **fixed) == sum(steps)
    assert value(found, f"{name}_count", **fixed) == len(steps)
    for (sample, labels), number in found.items():
        if sample == f"{name}_bucket":
            most = float(dict(labels)["le"])
            assert number == sum(tokens <= most for tokens in steps)


def test_vllms_counters_are_there_before_the_first_text():
    metrics = Metrics((), (), lambda: Gauges(), "story")
    found = samples(metrics)
    fixed = {"model_name": "story", "engine": "0"}
    assert value(found, "vllm:spec_decode_num_drafts_total", **fixed) == 0
    assert value(found, "vllm:generation_tokens_total", **fixed) == 0


def test_random_input_adds_no_series():
    metrics, rng = served("story"), random.Random(0)
    metrics.request(None, "none", 0.1)
    metrics.request("/v1/recommend", "beam", 0.1)
    metrics.request("/v1/recommend", "none", 0.1)
    metrics.request(None, "beam", 0.1)
    before = set(samples(metrics))
    for _ in range(5_000):
        word = "".join(rng.choices(string.printable, k=rng.randrange(1, 30)))
        metrics.request(word, rng.choice(("beam", word)), rng.random())
        metrics.request("/v1/recommend", word, rng.random())
        metrics.failure(word, word)
        metrics.count_degraded([word])
        metrics.texts_ended([word, None, "stop"], rng.random(), rng.random())
    assert set(samples(metrics)) == before
