"""Captured steps with rules other than `sample` write the texts of launched steps.

Steps are recorded and replayed on the CPU (recorder.py), over a poisoned pool; the engine that
launches its steps verifies the texts of each rule separately, and drawn drafts by another loop,
`verify.rejection.reject`.
"""

import pytest
import torch

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.draft_model.specinfer import specinfer
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.ngram import NgramDrafter
from recserve.engine.capture import EagerRecorder
from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step_graph import SHAPES as ALL
from recserve.engine.text_step_graph import StepShape, TextStepGraphs, TextStepLimits
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import TextDraft, empty_draft
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.device_worlds import text_engine
from tests.support.grids import chosen, sampled
from tests.support.pretend_cuda import PretendCuda, looks_of_replays
from tests.support.recorded_steps import Counted, with_graphs
from tests.support.text_engines import (
    PARAMETERS,
    add_drafter,
    assert_no_leak,
    engine_for,
    prompts,
    shared_model,
)
from tests.support.text_plain import VOCABULARY, drawn_model

SHAPES = (StepShape(2, 1, 0), StepShape(8, 1, 6), StepShape(100, 8, 12))
DRAWN = [name for name, fields in PARAMETERS.items() if fields["temperature"]]


def drafters_of(model):
    """Fresh ones: those of an engine know its texts by their numbers."""
    return {
        "close": ModelDrafter(model, VOCABULARY, (1,) * 4),
        "far": ModelDrafter(drawn_model(3), VOCABULARY, (1,) * 5),
        "trees": ModelDrafter(drawn_model(3), VOCABULARY, (2, 1, 2)),
        "models": specinfer([model, drawn_model(3)], VOCABULARY, (2, 1)),
        "distinct": specinfer([model], VOCABULARY, (2, 1)),
        "ngram": NgramDrafter(min_match=1),
    }


@pytest.fixture(scope="module")
def engines():
    """One that launches its steps, one that replays them, and the counts of its records."""
    model, counted = shared_model(), Counted()
    replaying = with_graphs(model, counted, SHAPES, drafters=drafters_of(model))
    return engine_for(model, drafters=drafters_of(model)), replaying, counted


def requests_of(name, *speculations):
    """Eight texts, four under other parameters, one of them greedy; drafted for in turns."""
    requests = []
    for number, prompt in enumerate(prompts(8)):
        other = DRAWN[(DRAWN.index(name) + number // 2) % len(DRAWN)]
        fields = PARAMETERS[name if number % 2 == 0 else "greedy" if number == 3 else other]
        params = SamplingParams(**{"seed": 100 + number, "max_tokens": 12} | fields)
        speculation = speculations[number % len(speculations)]
        requests.append(TextQuery(prompt, params, speculation))
    return requests


def assert_same_texts(engines, requests):
    """Returns the answers and how many steps were replayed."""
    launching, replaying, counted = engines
    wanted = [answer.tokens.tolist() for answer in launching.run_many(requests)]
    with torch.inference_mode():
        replaying.schedulers["text"].graphs._draft_values.fill_(float("nan"))
    before = counted.replays
    answers = replaying.run_many(requests)
    assert [answer.tokens.tolist() for answer in answers] == wanted
    assert_no_leak(replaying)
    return answers, counted.replays - before


@pytest.mark.slow
@pytest.mark.parametrize("name,drafter", sampled(DRAWN, ("close", "far"), default=()))
def test_replays_write_the_launched_text(name, drafter, engines):
    """Alone, and eight together with neighbours of other parameters."""
    requests = requests_of(name, Speculation(drafter, "rejection"))
    alone, replays = assert_same_texts(engines, requests[:1])
    assert replays == alone[0].timing.forwards - (alone[0].timing.prefix_computed > 0)
    answers, replays = assert_same_texts(engines, requests)
    assert replays > 0
    drafted = sum(answer.counts.num_draft_tokens for answer in answers)
    accepted = sum(answer.counts.num_accepted_tokens for answer in answers)
    assert accepted > 0 and (drafter == "close" or accepted < drafted)


@pytest.mark.slow
def test_chosen_drafts_beside_drawn_ones(engines):
    """Their q is 1 at their tokens, in a step that holds rows of others."""
    rules = [Speculation(drafter, "rejection") for drafter in ("close", "ngram", "far")]
    _, replays = assert_same_texts(engines, requests_of("hot", *rules))
    assert replays > 3
    _, replays = assert_same_texts(engines, requests_of("hot", Speculation("ngram", "rejection")))
    assert replays > 3


@pytest.mark.parametrize("drafter", chosen(("trees", "models", "distinct"), "trees"))
def test_several_drawn_children_are_replayed(drafter, engines):
    """multi_step: independent siblings, those of two models, and without replacement; so that paths
    are moved and residuals repeat.
    """
    requests = requests_of("warm", Speculation(drafter, "multi_step"))[:4]
    answers, replays = assert_same_texts(engines, requests)
    assert replays > 0 and sum(answer.counts.num_accepted_tokens for answer in answers) > 0


MIXTURES = {
    "block": [Speculation("far", "block")],
    "typical": [Speculation("ngram", "typical"), Speculation("trees", "typical")],
    "two rules": [Speculation("far", "rejection"), Speculation("close", "sample")],
    "all rules": [
        Speculation("far", "block"),
        Speculation("ngram", "typical"),
        Speculation("distinct", "multi_step"),
        Speculation("ngram", "sample"),
        Speculation("close", "rejection"),
        Speculation("ngram", "block"),
        Speculation("trees", "typical"),
        Speculation("models", "multi_step"),
    ],
}


@pytest.mark.parametrize(
    "name,mixture", sampled(DRAWN, tuple(MIXTURES), default=["everything-all rules"])
)
def test_each_text_is_judged_by_its_own_rule(name, mixture, engines):
    """Of eight in a step, chains and trees, drawn and chosen, one of them greedy."""
    counts = engines[1].schedulers["text"].graphs.counts
    before = counts["prompt"]
    answers, replays = assert_same_texts(engines, requests_of(name, *MIXTURES[mixture]))
    steps = max(answer.timing.forwards for answer in answers)
    assert replays >= steps - (counts["prompt"] - before) > 3
    assert sum(answer.counts.num_accepted_tokens for answer in answers) > 0


def test_drawn_drafts_without_a_place_for_probs_are_launched(engines):
    """Of a drafter that was not there when steps were recorded."""
    model = shared_model()
    engine = with_graphs(model, Counted(lambda step: step), SHAPES)
    for name, drafter in drafters_of(model).items():
        add_drafter(engine, name, drafter)
    requests = requests_of("hot", Speculation("far", "block"))
    wanted = [answer.tokens.tolist() for answer in engines[0].run_many(requests)]
    assert [answer.tokens.tolist() for answer in engine.run_many(requests)] == wanted
    assert engine.schedulers["text"].graphs.counts["drawn"] > 3


def test_what_is_recorded_follows_from_the_drafters(engines):
    names = [made.bucket.name for made in engines[1].schedulers["text"].graphs.captured]
    sizes = ["2x1", "8x1", "100x8"]
    plain = [*sizes, *(size + "+" for size in sizes)]
    mixed = ["8x1+ mixed", "100x8+ mixed"]
    assert names == [*plain, *(f"{s} rejection" for s in [*sizes[1:], "8x1+", "100x8+"]), *mixed]
    model = shared_model()
    for drafters, drawn in (
        ({"ngram": NgramDrafter()}, False),
        ({"both": MergedDrafter([NgramDrafter(), drafters_of(model)["far"]])}, True),
    ):
        graphs = with_graphs(model, Counted(lambda step: step), SHAPES, drafters=drafters)
        recorded = graphs.schedulers["text"].graphs.captured
        assert any(made.bucket.kind.rule == "rejection" for made in recorded) == drawn


def test_buckets_that_chains_cannot_fill_are_left_out():
    """Of those that are verified by rejection; after all records of `sample`, before those of texts
    with rules of their own, and in one place for probs.
    """
    model, wanted, sampled = shared_model(), [], 2 * len(ALL)
    scheduler = engine_for(model).schedulers["text"]
    limits = TextStepLimits(ALL, seconds=float("inf"), bytes=sampled * 2**30)

    class Large(EagerRecorder):
        def __call__(self, step):
            wanted.append(step)
            self.bytes += 2**30
            return step

    def made_by(limits):
        wanted.clear()
        names = {"far": drafters_of(model)["far"]}
        return TextStepGraphs(scheduler.runner, scheduler.kv, model, limits, Large(), names)

    drawn = [made for made in made_by(limits).captured if made.bucket.kind.rule == "rejection"]
    assert [made.bucket.name for made in drawn] == ["16x1 rejection"]
    graphs = made_by(TextStepLimits(ALL, seconds=float("inf"), bytes=2**40))
    drawn = [made for made in graphs.captured if made.bucket.kind.rule == "rejection"]
    sizes = ["16x1", "16x8", "40x32", "72x8", "72x64", "136x128", "264x32", "264x128"]
    sizes += ["520x64", "520x128", "1032x128"]
    assert [made.bucket.name for made in drawn] == [
        *(f"{size} rejection" for size in sizes),
        *(f"{size}+ rejection" for size in sizes),
    ]
    assert all(step.draft_values is None for step in wanted[:sampled])
    assert {made.draft_values.data_ptr() for made in drawn} == {graphs._draft_values.data_ptr()}
    assert graphs._draft_values.shape == (903, VOCABULARY)


class DeviceDrafts(Drafter):
    """Chains drawn from rows of its own, all on a device; uniform, so that many are refused."""

    draws = True

    def __init__(self, vocabulary, device):
        self.values = torch.full((3, vocabulary), 1 / vocabulary, device=device)
        self.tokens = torch.arange(3, 6, device=device)
        self.parents = torch.arange(-1, 2, device=device)

    def propose(self, contexts, budgets):
        return [
            TextDraft(
                self.tokens[:n], self.parents[:n], n, self.values[:n]
            ) if (n := min(budget.num_nodes, budget.depth, 3)) else empty_draft("cuda")
            for budget in budgets
        ]  # fmt: skip


@pytest.mark.slow
def test_the_host_waits_once_a_step(monkeypatch, force_kernels):
    """On a pretended device: one look, no upload that is waited for."""
    from tests.support import triton_interpreter

    force_kernels("triton")
    launches = triton_interpreter.interpret_pretended(monkeypatch)
    with PretendCuda() as device:
        engine = text_engine("cuda", [])
        scheduler = engine.schedulers["text"]
        engine.drafters["drawn"] = DeviceDrafts(scheduler.model.config.vocab_size, "cuda")
        limits = TextStepLimits((StepShape(5, 1, 3),), seconds=float("inf"))
        graphs = TextStepGraphs(
            scheduler.runner,
            scheduler.kv,
            scheduler.model,
            limits,
            EagerRecorder(),
            engine.drafters,
        )
        engine.schedulers["text"] = TextScheduler(
            scheduler.runner, scheduler.model, scheduler.limits, graphs, kv=scheduler.kv
        )
        words = Speculation("drawn", "rejection", num_tokens=3)
        engine.submit(TextQuery(prompts(1)[0], SamplingParams(1.3, max_tokens=7), words))
        waits = looks_of_replays(device, engine, graphs)
        assert len(waits) > 2 and launches["drawn_walk_kernel"] >= len(waits)
        for counts, table in waits:
            assert counts["read"] <= 1 and not counts["shape"] and not counts["upload"], table
