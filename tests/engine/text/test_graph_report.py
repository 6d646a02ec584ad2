"""What operators read about recorded steps: in the log, on /metrics, from `recserve doctor`."""

import logging
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from recserve.cli import doctor
from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.engine.beam_search_graph import SearchShape
from recserve.engine.capture import EagerRecorder
from recserve.engine.draft_graph import DraftGraphs, DraftLimits
from recserve.engine.text_step_graph import StepShape
from recserve.engine.text_trees import CapturedDrafts
from recserve.metrics import Metrics
from recserve.service.service import gauges_of
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.device_worlds import recommending
from tests.support.recorded_searches import with_searches
from tests.support.recorded_steps import Counted, with_graphs
from tests.support.text_engines import add_drafter, eagle, engine_for, prompts
from tests.support.text_plain import VOCABULARY, drawn_model

SHAPES = (StepShape(4, 2, 1), StepShape(9, 2, 4))


@pytest.fixture(scope="module")
def engine():
    """Steps of every fate: replayed; with a prompt; drawn drafts that nobody announced; too many
    words; too many texts.
    """
    model = drawn_model(1)
    made = with_graphs(model, Counted(lambda step: step), SHAPES)
    prompt = prompts(8)[2]
    add_drafter(made, "drawn", ModelDrafter(model, VOCABULARY))
    plain = SamplingParams(max_tokens=5)
    words = tuple((n % 40, n % 7) for n in range(100))
    made.run(TextQuery(prompt, plain))
    drawn = SamplingParams(1.0, max_tokens=12)
    made.run(TextQuery(prompt, drawn, Speculation("drawn", "rejection")))
    made.run(TextQuery(prompt, SamplingParams(max_tokens=5, bad_words=words)))
    made.run_many([TextQuery(p, plain) for p in prompts(4)])
    return made


def test_steps_are_counted_by_what_became_of_them(engine):
    counts = dict(engine.stats().graph_steps)
    assert all(counts[name] > 0 for name in ("replayed", "prompt", "drawn", "parameters", "size"))
    before = counts
    engine.run(TextQuery(prompts(8)[2], SamplingParams(max_tokens=3)))
    counts = engine.stats().graph_steps
    gained = {name: counts[name] - before[name] for name in counts}
    assert gained.pop("replayed") + gained.pop("prompt") == 3 and not any(gained.values())


def test_metrics_name_the_buckets(engine):
    metrics = Metrics((), (), lambda: gauges_of(engine.stats()))
    found = {
        sample.name: {
            **{tuple(s.labels.values()): s.value for s in family.samples if s.name == sample.name}
        }
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
    }
    buckets = {("4x2",), ("9x2",), ("4x2+",), ("9x2+",), ("4x2+ mixed",), ("9x2+ mixed",)}
    assert set(found["recserve_graph_record_seconds"]) == buckets
    assert set(found["recserve_graph_record_bytes"]) == buckets
    assert all(seconds > 0 for seconds in found["recserve_graph_record_seconds"].values())
    assert "recserve_graph_missing" not in found
    results = ("replayed", "prompt", "drawn", "parameters", "size", "rule")
    assert set(found["recserve_graph_steps_total"]) == {(name,) for name in results}


def test_metrics_name_the_searches(force_kernels):
    """Of a recommender: one that is replayed, one that is too wide."""
    force_kernels("torch")
    world = recommending("cpu")
    with_searches(
        world, world.trie, lambda step: step, (SearchShape(2, 8), SearchShape(1, 8, None))
    )
    for width in (8, 9):
        world.engine.run_many([replace(r, beam_width=width) for r in world.ask("nezha")])
    page = Metrics((), (), lambda: gauges_of(world.engine.stats())).page().decode()
    for result, count in (("replayed", 1), ("size", 1), ("version", 0)):
        assert f'recserve_graph_searches_total{{result="{result}"}} {count}.0' in page
    for name in ("beam 2x8", "nezha 2x8", "beam 1x8 filtered", "nezha 1x8 filtered"):
        assert f'recserve_graph_record_seconds{{bucket="{name}"}}' in page
    assert "recserve_graph_steps_total{" not in page


def test_metrics_and_doctor_name_what_does_not_fit():
    """Of a captured drafter: what its limit of memory leaves out."""
    model = drawn_model(1)
    drafter = eagle(model, fused=True, width=8, depth=2)
    most = 8 * drafter.min_bytes(drafter.forms[0], greedy=False) - 1
    engine = engine_for(model, drafters={"eagle": drafter})
    scheduler = engine.schedulers["text"]
    place = CapturedDrafts.allocate(len(scheduler.kv.slots), 64, scheduler.kv.slots.device)
    limits = DraftLimits((1, 8), seconds=float("inf"), bytes=most)
    scheduler.drafts = DraftGraphs(
        scheduler.kv, model, {"eagle": drafter}, place, limits, EagerRecorder()
    )
    stats = engine.stats()
    page = Metrics((), (), lambda: gauges_of(stats)).page().decode()
    assert page.count("recserve_graph_missing{") == 2
    assert 'recserve_graph_missing{bucket="eagle tree 2x8+"} 1.0' in page
    assert 'recserve_graph_record_bytes{bucket="eagle chain 2x8+"}' in page
    finding = doctor.describe_graphs(stats)
    assert finding.state == "warn" and finding.detail.endswith("eagle tree 2x8, eagle tree 2x8+")


def test_nothing_is_said_where_nothing_is_recorded():
    stats = engine_for(drawn_model(1)).stats()
    page = Metrics((), (), lambda: gauges_of(stats)).page().decode()
    assert "recserve_graph_steps_total{" not in page and "recserve_graph_record_bytes{" not in page


def test_the_log_names_what_was_recorded(caplog):
    with caplog.at_level(logging.INFO, "recserve"):
        with_graphs(drawn_model(1), Counted(lambda step: step), SHAPES[:1])
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "captured 4x2",
        "captured 4x2+",
        "captured 4x2+ mixed",
    ]


def test_the_doctor_names_them_too(engine):
    finding = doctor.describe_graphs(engine.stats())
    assert finding.state == "ok"
    for name in ("6 steps in", "4x2 ", "9x2 ", "4x2+ ", "9x2+ ", "9x2+ mixed ", " MiB"):
        assert name in finding.detail
    bare = engine_for(drawn_model(1)).stats()
    assert doctor.describe_graphs(bare).state == "warn"


def test_the_doctor_names_searches_and_what_is_launched(force_kernels):
    """The third record fails: two are there, two are launched, each by its name."""
    force_kernels("torch")
    world, made = recommending("cpu"), []

    def record(step):
        made.append(step)
        if len(made) == 3:
            raise RuntimeError("out of memory")
        return step

    shapes = (SearchShape(2, 8), SearchShape(1, 8, None))
    with_searches(world, world.trie, record, shapes)
    finding = doctor.describe_searches(world.engine.stats(), ("beam", "nezha", "dense"))
    assert finding.state == "warn" and "2 searches in" in finding.detail
    recorded, launched = finding.detail.split("; ", 1)
    assert "beam 2x8 " in recorded and " s 0 MiB" in recorded and "filtered" not in recorded
    assert "beam 1x8 filtered, nezha 1x8 filtered; " in launched
    assert launched.endswith("dense (no beam search)")


@pytest.mark.parametrize(("weighs", "count"), [(False, 16), (True, 32)])
def test_the_doctor_tells_of_a_gpu_without_one(weighs, count):
    """Eight pairs of requests and beams, excluded items by list and by bitmap, per search."""
    detail = doctor.plan_searches(weighs, ("beam", "speculative"), "cpu").detail
    wanted = f"a GPU captures {count} searches of up to 32 requests and 512 beams"
    assert detail == f"none on cpu; {wanted}, within 60 s and 2048 MiB"
    assert f"{2 * count} searches" in doctor.plan_searches(weighs, ("beam", "nezha"), "cpu").detail


def test_the_doctor_says_which_vocabulary_is_too_large():
    """1,032 nodes of 11.25 tables of float32: 46,440 bytes a token of 2 GiB."""
    assert "all steps fit into 2048 MiB" in doctor.vocabulary_limit(32_000, {})
    said, large = doctor.vocabulary_limit(151_936, {}), "520x8+, 520x64+, 520x128+, 1032x128+"
    assert said.endswith(f"steps of more than 2048 MiB are not captured: {large}")
    assert "all steps" in doctor.vocabulary_limit(46_242, {})
    assert doctor.vocabulary_limit(46_243, {}).endswith(": 1032x128+")


def test_the_doctor_says_which_drafts_are_too_large():
    """64 texts with eight rows of a level, in three tables of float32: 6,144 bytes a token."""
    drafter, said = eagle(drawn_model(1), fused=True, width=8), []
    for words in (349_525, 349_526):
        config = drafter.network.config
        drafter.network.config = replace(config, vocab_size=words, draft_vocab_size=words)
        said.append(doctor.vocabulary_limit(1000, {"eagle": drafter}))
    assert said[0].endswith("all steps and drafts fit into 2048 MiB")
    trees = (f"eagle tree {depth}x64{drawn}" for depth in (4, 2) for drawn in ("", "+"))
    assert said[1].endswith(f"not captured: {', '.join(trees)}")


def test_the_doctor_loads_the_model_it_is_asked_about(tmp_path):
    findings = {f.name: f for f in doctor.examine(llm=tmp_path / "none")}
    assert findings["graphs"].state == "fail" and "no such folder" in findings["graphs"].detail
