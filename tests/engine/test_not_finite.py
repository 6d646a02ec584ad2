"""A model output that is NaN ends its own request with an error, and nothing else.

One forward is made to return NaN for one request. Its neighbours must get the answers they always
get, the same request must be answered rightly right after, and no page may hold what was wrong.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from recserve.core.finite import NotFinite, all_finite, nonfinite_flags, without_nonfinite
from recserve.core.request import PrefixKeys
from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.ngram import NgramDrafter
from recserve.engine.beam_search_graph import (
    BeamSearchGraphs,
    CapturedStates,
    SearchLimits,
    SearchShape,
)
from recserve.engine.capture import EagerRecorder
from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step_graph import StepShape, TextStepGraphs, TextStepLimits
from recserve.kernels.cache.fp8 import parts
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.device_worlds import ranking, recommending, text_scores
from tests.support.grids import chosen, covering, thin
from tests.support.pretend_cuda import PretendCuda
from tests.support.text_engines import engine_for, prompts, shared_model
from tests.support.text_plain import drawn_model

NAN = float("nan")
AT_ONCE = ("nezha", "rpg", "dense")
IN_TREES = ("beam", "speculative", "specgr", "likelihood")


class Fault:
    """Makes the states of one tree NaN in one forward, and its keys and values if `written`.

    tree: its number among the trees of the forward; prefixes under way come before trees of items.
    """

    def __init__(self, runner, tree, forward=0, value=NAN, written=True):
        self.runner, self.tree, self.left = runner, tree, forward
        self.value, self.written, self.struck = value, written, False
        self.compute = runner.compute
        runner.compute = self

    def __call__(self, batch, inputs, rows=None, aux_states=None):
        states = self.compute(batch, inputs, rows, aux_states)
        self.left -= 1
        if self.left == -1:
            self.struck = True
            owners = batch.tree.tree_ids()
            owners = owners if batch.queries is None else owners[batch.queries]
            if self.written:
                slots = batch.query_slots()[owners == self.tree]
                self.runner.pool.keys[:, slots] = self.value
                self.runner.pool.values[:, slots] = self.value
            read = owners if rows is None else owners[rows]
            states = torch.where((read == self.tree)[:, None], self.value, states)
        return states

    def end(self):
        self.runner.compute = self.compute
        assert self.struck, "there was no such forward"


def outcomes(engine, requests):
    """Answers, and errors in the place of answers."""
    futures = [engine.submit(request) for request in requests]
    while engine.step():
        pass
    return [future.exception() or future.result() for future in futures]


def numbers(answer):
    """What may be rounded, and what may not."""
    close = getattr(answer, "scores", getattr(answer, "values", np.zeros(0)))
    exact = getattr(answer, "rows", getattr(answer, "tokens", np.zeros(0)))
    return exact.tolist(), close


def assert_same(got, wanted):
    assert not isinstance(got, Exception), got
    assert numbers(got)[0] == numbers(wanted)[0]
    np.testing.assert_allclose(numbers(got)[1], numbers(wanted)[1], rtol=1e-4, atol=1e-5)
    assert getattr(got, "exact", None) == getattr(wanted, "exact", None)


def assert_clean(scheduler):
    """No number of the pool is wrong, and every page is free or held by the cache alone."""
    for stored in (scheduler.runner.pool.keys, scheduler.runner.pool.values):
        for part in parts(stored):
            assert torch.isfinite(part.float()).cpu().all()
    assert scheduler.num_running == 0
    allocator = scheduler.kv.allocator
    assert allocator.num_free + allocator.num_idle == allocator.num_pages


def num_cached(scheduler, request):
    """Rows of a request's prefix that the prefix cache holds."""
    keys = PrefixKeys(request.prefix.keys, request.prefix.shared)
    pages, length, cached = scheduler.kv.prefixes.match(keys)
    scheduler.kv.allocator.release(pages)
    return length if cached is not None else 0


def assert_one_fails(engine, scheduler, requests, which, forward, **fault):
    """The request `which` fails by a fault in the forward; the others never notice."""
    wanted = outcomes(engine, requests)
    engine.forget_all()
    broken = Fault(scheduler.runner, which, forward, **fault)
    with torch.inference_mode():
        got = outcomes(engine, requests)
    broken.end()
    for number, (answer, expected) in enumerate(zip(got, wanted, strict=True)):
        if number == which:
            assert isinstance(answer, NotFinite), answer
            assert num_cached(scheduler, requests[number]) == 0
        else:
            assert_same(answer, expected)
            assert num_cached(scheduler, requests[number]) == len(requests[number].prefix.keys)
    assert_clean(scheduler)
    for request, expected in zip(requests, wanted, strict=True):
        assert_same(outcomes(engine, [request])[0], expected)
    return got


def queries_of(world, strategy, events=(3, 9, 6)):
    requests = world.ask(strategy, "plain", events)
    if strategy == "specgr":
        requests = [replace(request, index=world.index) for request in requests]
    return requests


@pytest.fixture(scope="module", params=["items", "codes"])
def world(request):
    return recommending("cpu", request.param)


@pytest.mark.parametrize(
    "strategy, which, value",
    covering([*IN_TREES, *AT_ONCE], (0, 2), (NAN, float("inf"), -float("inf"))),
)
def test_a_prefix_that_is_not_finite(world, strategy, which, value):
    scheduler = world.engine.schedulers["recommender"]
    requests = queries_of(world, strategy)
    assert_one_fails(world.engine, scheduler, requests, which, 0, value=value)


@pytest.mark.parametrize("strategy, which", covering(IN_TREES, (0, 2)))
def test_a_tree_that_is_not_finite(world, strategy, which, monkeypatch):
    # specgr goes on to its beams
    monkeypatch.setattr("recserve.search.strategies.specgr.MIN_LIFT", 1e9)
    scheduler = world.engine.schedulers["recommender"]
    assert_one_fails(world.engine, scheduler, queries_of(world, strategy), which, 1)


@pytest.mark.parametrize("variant", ["filters", "diversity", "weighed"])
@pytest.mark.parametrize("strategy", ["beam", "speculative"])
def test_a_tree_that_is_not_finite_under_filters_caps_and_weights(strategy, variant):
    world = recommending("cpu")
    scheduler = world.engine.schedulers["recommender"]
    requests = world.ask(strategy, variant, (3, 9))
    assert_one_fails(world.engine, scheduler, requests, 0, 1)


@pytest.mark.parametrize("strategy", IN_TREES)
def test_the_last_forward_is_looked_at_like_the_first(world, strategy):
    scheduler = world.engine.schedulers["recommender"]
    request = queries_of(world, strategy)[0]
    counted = Fault(scheduler.runner, 0, 10**9)
    outcomes(world.engine, [request])
    forwards = 10**9 - counted.left
    scheduler.runner.compute = counted.compute
    assert_one_fails(world.engine, scheduler, [request], 0, forwards - 1)


def test_a_warmed_prefix_that_is_not_finite_is_not_kept(world):
    scheduler = world.engine.schedulers["recommender"]
    assert_one_fails(world.engine, scheduler, queries_of(world, "warm")[:1], 0, 0)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("forward", [0, 1])
def test_a_ranking_that_is_not_finite(which, forward):
    world = ranking("cpu")
    scheduler = world.engine.schedulers["ranker"]
    assert_one_fails(world.engine, scheduler, world.ask(), which, forward)


@pytest.mark.parametrize("forward", [0, 1])
def test_scored_texts_that_are_not_finite(forward):
    engine = engine_for(shared_model())
    assert_one_fails(engine, engine.schedulers["text_scores"], [text_scores("cpu")], 0, forward)


def test_scores_that_are_not_finite_are_no_ranking(monkeypatch):
    """The states are right, the task heads are not."""
    world = ranking("cpu")
    heads = world.ranker.heads

    def broken(hidden):
        logits = heads(hidden)
        logits[0, 0] = NAN
        return logits

    requests = world.ask()
    wanted = outcomes(world.engine, requests)
    with monkeypatch.context() as patch:
        patch.setattr(world.engine._strategies["ranker"].model, "heads", broken)
        got = outcomes(world.engine, requests)
    assert isinstance(got[0], NotFinite)
    assert_same(got[1], wanted[1])
    assert_same(outcomes(world.engine, requests[:1])[0], wanted[0])


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_request_that_fails_alone_leaves_nothing_in_its_pages(kernels, force_kernels):
    """Who gets the pages next may weigh what lies there by zero, which is NaN for NaN."""
    if kernels == "torch":
        force_kernels("torch")
    world = recommending("cpu")
    scheduler = world.engine.schedulers["recommender"]
    everything = queries_of(world, "beam")
    for which in range(3):
        assert_one_fails(world.engine, scheduler, everything[: which + 1], which, 0)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_fault_inside_the_network_stays_with_its_request(kernels, monkeypatch, force_kernels):
    """One row of a prefix goes wrong before the first layer: attention must not carry it over."""
    if kernels == "torch":
        force_kernels("torch")
    world = recommending("cpu")
    engine, requests = world.engine, queries_of(world, "beam")
    wanted = outcomes(engine, requests)
    engine.forget_all()
    forward, calls = world.model.decoder.forward, []

    def broken(rows, *arguments):
        calls.append(rows)
        if len(calls) == 1:
            rows = rows.clone()
            rows[1] = NAN
        return forward(rows, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(world.model.decoder, "forward", broken)
        got = outcomes(engine, requests)
    assert isinstance(got[0], NotFinite)
    for number in (1, 2):
        assert_same(got[number], wanted[number])
    assert_clean(engine.schedulers["recommender"])
    for answer, expected in zip(outcomes(engine, requests), wanted, strict=True):
        assert_same(answer, expected)


# On a device the host does not read states. Keys and values stay finite here, because the twin of
# the kernels multiplies those of other trees by zero.
ON_DEVICE = {"written": False}


@pytest.fixture
def plain_kernels(force_kernels):
    force_kernels("torch")


@pytest.mark.parametrize(
    "asked_for, which",
    thin(covering([*product(IN_TREES, (0, 1)), *product(AT_ONCE, (0,))], (0, 1)), 6),
)
def test_on_a_device_the_answer_tells(asked_for, which, plain_kernels, monkeypatch):
    strategy, forward = asked_for
    monkeypatch.setattr("recserve.search.strategies.specgr.MIN_LIFT", 1e9)
    with PretendCuda():
        world = recommending("cuda")
        scheduler = world.engine.schedulers["recommender"]
        requests = queries_of(world, strategy, (3, 9))
        assert_one_fails(world.engine, scheduler, requests, which, forward, **ON_DEVICE)


def test_on_a_device_a_ranking_tells(plain_kernels):
    with PretendCuda():
        world = ranking("cuda")
        scheduler = world.engine.schedulers["ranker"]
        assert_one_fails(world.engine, scheduler, world.ask(), 1, 1, **ON_DEVICE)


def test_on_a_device_a_ranking_under_such_a_prefix_tells(plain_kernels):
    """Of the prefix a ranking reads keys and values alone."""
    with PretendCuda():
        world = ranking("cuda")
        scheduler = world.engine.schedulers["ranker"]
        assert_one_fails(world.engine, scheduler, world.ask()[:1], 0, 0)


SEARCHES = (SearchShape(4, 16, 24), SearchShape(4, 16, None), SearchShape(4, 16, 24, True))


@pytest.mark.parametrize("variant, level", covering(("plain", "filters", "weighed"), (0, 1)))
def test_a_recorded_search_tells(variant, level, plain_kernels, monkeypatch):
    """Its forwards are those of the scorer, one for each level."""
    world = recommending("cpu")
    engine, scheduler = world.engine, world.engine.schedulers["recommender"]
    limits = SearchLimits(SEARCHES, capacity=40, seconds=float("inf"))
    head = engine._strategies["nezha"].head
    with torch.inference_mode():
        graphs = BeamSearchGraphs(
            scheduler.runner, scheduler.kv, world.model, head, limits, EagerRecorder()
        )
        scheduler.searches = graphs
        engine.capture(world.trie)
    requests = world.ask("beam", variant)
    wanted = outcomes(engine, requests)
    engine.forget_all()
    forward, calls = CapturedStates._forward, []

    def broken(scorer, batch, tokens):
        states = forward(scorer, batch, tokens)
        calls.append(batch)
        if len(calls) == level + 1:
            owners = batch.tree.tree_ids()
            owners = owners if batch.queries is None else owners[batch.queries]
            states = torch.where((owners == 1)[:, None], NAN, states)
        return states

    with monkeypatch.context() as patch:
        patch.setattr(CapturedStates, "_forward", broken)
        got = outcomes(engine, requests)
    assert graphs.counts["replayed"] == 2 and calls
    assert_same(got[0], wanted[0])
    assert isinstance(got[1], NotFinite)
    assert num_cached(scheduler, requests[1]) == 0
    for request, expected in zip(requests, wanted, strict=True):
        assert_same(outcomes(engine, [request])[0], expected)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_recorded_search_from_prefixes_that_are_not_finite_tells(which, plain_kernels):
    """Placeholders behind the prefix too, which `nezha` reads."""
    with PretendCuda():
        world = recommending("cuda")
        engine, scheduler = world.engine, world.engine.schedulers["recommender"]
        limits = SearchLimits(SEARCHES, capacity=40, seconds=float("inf"))
        head = engine._strategies["nezha"].head
        with torch.inference_mode():
            graphs = BeamSearchGraphs(
                scheduler.runner, scheduler.kv, world.model, head, limits, EagerRecorder()
            )
            scheduler.searches = graphs
            engine.capture(world.trie)
        for strategy in ("beam", "nezha"):
            requests = world.ask(strategy)
            assert_one_fails(engine, scheduler, requests, which, 0, **ON_DEVICE)
        assert not graphs.counts["size"]


# --- texts -------------------------------------------------------------------------------------

PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.3},
    "penalties": {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.2, "logprobs": 2},
}
RULES = ("sample", "rejection", "multi_step", "block", "typical")


def texts(parameters="greedy", speculation=None, count=3):
    return [
        TextQuery(
            prompt,
            SamplingParams(**{"max_tokens": 9, "seed": n} | PARAMETERS[parameters]),
            speculation or Speculation("none"),
        )
        for n, prompt in enumerate(prompts(count, seed=2, low=6))
    ]


def assert_one_text_fails(engine, requests, which, tree, forward, **fault):
    scheduler = engine.schedulers["text"]
    wanted = outcomes(engine, requests)
    engine.forget_all()
    broken = Fault(scheduler.runner, tree, forward, **fault)
    with torch.inference_mode():
        got = outcomes(engine, requests)
    broken.end()
    for number, (answer, expected) in enumerate(zip(got, wanted, strict=True)):
        if number == which:
            assert isinstance(answer, NotFinite), answer
        else:
            assert_same(answer, expected)
    assert_clean(scheduler)
    for request, expected in zip(requests, wanted, strict=True):
        assert_same(outcomes(engine, [request])[0], expected)


@pytest.mark.parametrize(
    "parameters, forward, which", covering(tuple(PARAMETERS), (0, 1, 4), (0, 2))
)
def test_a_text_whose_logits_are_not_finite(parameters, forward, which):
    engine = engine_for(shared_model())
    assert_one_text_fails(engine, texts(parameters), which, which, forward)


@pytest.mark.parametrize("rule", chosen(RULES, "sample", "multi_step", "block"))
def test_a_drafted_text_whose_logits_are_not_finite(rule):
    model = shared_model()
    drafters = {"ngram": NgramDrafter(min_match=1), "model": ModelDrafter(model, 40, (1,) * 3)}
    for name in drafters:
        if name == "ngram" and rule == "multi_step":
            continue  # the rule needs drafts that were drawn
        engine = engine_for(model, drafters=drafters)
        requests = texts("hot", Speculation(name, rule))
        assert_one_text_fails(engine, requests, 1, 1, 1)


def test_a_prompt_whose_states_are_not_finite():
    """In the first forward the trees of three texts come before the chunks of their prompts."""
    engine = engine_for(shared_model())
    assert_one_text_fails(engine, texts(), 1, 3 + 1, 0)


def test_a_chunk_of_a_long_prompt_whose_states_are_not_finite():
    """The text does not step yet, but the other texts do."""
    model = shared_model()
    engine = engine_for(model)
    scheduler = engine.schedulers["text"]
    scheduler.limits = replace(scheduler.limits, prefill_tokens=12)
    requests = [TextQuery(np.arange(30) % 40, SamplingParams(temperature=0.0, max_tokens=4))]
    assert_one_text_fails(engine, requests, 0, 0, 1)
    short = TextQuery(np.arange(6), SamplingParams(temperature=0.0, max_tokens=9))
    requests = [short, *requests]
    assert_one_text_fails(engine, requests, 1, 0, 1)


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_finite_of_states_that_are(parameters, dtype, monkeypatch):
    model = shared_model()
    if dtype != torch.float32:
        model = packed_model(dtype)
    engine = engine_for(model)
    requests = texts(parameters)
    wanted = outcomes(engine, requests)
    logits, calls = model.logits, []

    def broken(hidden):
        rows = logits(hidden)
        calls.append(rows)
        if len(calls) == 3:
            rows = rows.clone()
            rows[1, 7] = NAN
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(engine.schedulers["text"].model, "logits", broken)
        got = outcomes(engine, requests)
    assert [isinstance(answer, NotFinite) for answer in got] == [False, True, False]
    assert_same(got[0], wanted[0])
    assert_same(got[2], wanted[2])
    assert_same(outcomes(engine, requests[1:2])[0], wanted[1])


def packed_model(dtype):
    model = drawn_model(1).to(dtype)
    pack_weights(model)
    return model


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_a_recorded_step_tells(parameters):
    model = shared_model()
    engine = engine_for(model)
    scheduler = engine.schedulers["text"]
    shapes = (StepShape(8, 4, 0), StepShape(24, 8, 4))
    with torch.inference_mode():
        limits = TextStepLimits(shapes, seconds=float("inf"))
        graphs = TextStepGraphs(scheduler.runner, scheduler.kv, model, limits, EagerRecorder())
    engine.schedulers["text"] = TextScheduler(
        scheduler.runner, model, scheduler.limits, graphs, kv=scheduler.kv
    )
    assert_one_text_fails(engine, texts(parameters), 1, 1, 2, written=False)
    assert graphs.counts["replayed"] > 4


# --- what all of it rests on -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_one_number_in_a_state_is_enough(dtype, value):
    states = torch.full((3, 781), 60.0, dtype=dtype)  # a sum of these is infinite in float16
    assert all_finite(states) and nonfinite_flags(states).tolist() == [0, 0, 0]
    states[1, 780] = value
    assert not all_finite(states)
    nonfinite = nonfinite_flags(states)
    assert nonfinite[0] == nonfinite[2] == 0 and torch.isnan(nonfinite[1])
    kept = without_nonfinite(states, nonfinite)
    assert kept.dtype == dtype and torch.equal(kept[[0, 2]], states[[0, 2]])
    assert not kept[1].any()


def test_infinities_of_both_signs_do_not_make_up_for_each_other():
    states = torch.tensor([[float("inf"), -float("inf")], [1.0, -1.0]])
    assert not all_finite(states) and torch.isnan(nonfinite_flags(states)).tolist() == [True, False]
