"""Captured drafts: recorded once, replayed on other texts, states, budgets and acceptances.

Captured and launched drafts are the same tokens and parents, so the texts are the same too, and the
drafter's pages hold the same entries.
"""

from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.registry import drafter_classes
from recserve.drafters.shared.feature_network import LayerView
from recserve.engine.capture import EagerRecorder
from recserve.engine.draft_graph import DraftBucket, DraftGraph, DraftGraphs, DraftLimits
from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step_graph import SHAPES, StepShape, TextStepGraphs, TextStepLimits
from recserve.engine.text_trees import CapturedDrafts
from recserve.speculation.completion import TextQuery
from recserve.speculation.drafter import READ
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.block_drafter import block
from tests.support.grids import chosen
from tests.support.mtp_drafter import mtp, peagle
from tests.support.pretend_cuda import PretendCuda
from tests.support.recorded_steps import POISON, Counted
from tests.support.specformer_drafter import specformer
from tests.support.text_engines import (
    assert_forgotten,
    assert_no_leak,
    eagle,
    engine_for,
    prompts,
    shared_model,
    undrafted,
)
from tests.support.text_plain import VOCABULARY, drawn_model


def block_maker(variant):
    """Returns a maker of a block drafter whose slots have `width` candidates."""
    return lambda m, seed=0, width=3, num_nodes=12, **_: block(
        m, variant, seed, num_candidates=width, num_nodes=num_nodes
    )


def with_views(model, view, **sizes):
    """Returns an EAGLE-3 drafter whose layer sees a part of the rows."""
    return eagle(model, True, fields={"views": (view,)}, **sizes)


def small_model(expansion):
    """Returns a drafter that is often as good as the shared model."""
    model, noise = drawn_model(1), torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.add_(0.8 * weight.std() * torch.randn(weight.shape, generator=noise))
    drafter = ModelDrafter(model, VOCABULARY, expansion)
    drafter.network = drafter.model  # as the others call it
    return drafter


SIZES = {"width": 3, "depth": 4, "num_nodes": 12}
MAKERS = {
    "mtp-2": lambda m, **sizes: mtp(m, modules=2, **sizes),
    "window": lambda m, **sizes: with_views(m, LayerView(window=4), **sizes),
    "moving": lambda m, **sizes: with_views(m, LayerView(first=1, window=5, moves=True), **sizes),
    "eagle": lambda m, **sizes: eagle(m, fused=False, **sizes),
    "eagle3": lambda m, **sizes: eagle(m, fused=True, **sizes),
    "mtp": mtp,
    "qwen-mtp": lambda m, **sizes: mtp(m, qwen=True, **sizes),
    "peagle": peagle,
    "dflash": block_maker("dflash"),
    "windows": block_maker("windows"),
    "dflash2": block_maker("dflash2"),
    "dspark-rnn": block_maker("dspark-rnn"),
    "draft-model": lambda m, depth=4, **_: small_model((1,) * depth),
    "draft-models-tree": lambda m, depth=4, **_: small_model((2, 1, 3, 1, 2)[:depth]),
    "specformer": lambda m, seed=0, width=3, num_nodes=12, **_: specformer(
        m, seed, width=width, num_nodes=num_nodes
    ),
}
STATIC = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))


def engine_with(model, drafter, recorder, pages, texts=(4,), steps=(), **config):
    """Returns an engine with poison in its pools. Its drafts are captured if there is a recorder,
    and its steps if there are shapes of them.
    """
    drafters = {drafter.name: drafter}
    engine = engine_for(model, pages, drafters, graphs=False, **config)
    lane = engine.schedulers["text"]
    drafts = graphs = captured = None
    forever = {"seconds": float("inf")}
    with torch.inference_mode():
        if recorder is not None:
            limits, rows = DraftLimits(texts=texts, **forever), len(lane.kv.slots)
            captured = CapturedDrafts.allocate(rows, lane.limits.draft_nodes, lane.kv.slots.device)
            drafts = DraftGraphs(lane.kv, model, drafters, captured, limits, recorder)
            assert not drafts.missing
        if steps:
            limits = TextStepLimits(steps, **forever)
            graphs = TextStepGraphs(
                lane.runner, lane.kv, model, limits, recorder, drafters, captured
            )
        for pool in (lane.runner.pool, drafter.pool):
            pool.keys.fill_(POISON)
            pool.values.fill_(POISON)
    engine.schedulers["text"] = TextScheduler(
        lane.runner, model, lane.limits, graphs, kv=lane.kv, drafts=drafts
    )
    return engine


def note_drafts(engine):
    """Returns a dictionary that receives each filled proposal, by its text's number and tokens,
    and by its size, which depends on the free pages under rules that read draft probabilities.

    With a proposal come the drafter's keys of all committed tokens.
    """
    proposer, found = engine.schedulers["text"]._proposer, {}
    propose = proposer.propose

    def noted(texts, prefill):
        drafts, refusals = propose(texts, prefill)
        for text, draft in drafts.items():
            if len(draft):
                slots, pool = text.context.slots[1 : text.length], text.drafter.pool
                key = text.context.id, tuple(text.context.tokens), len(draft)
                nodes = list(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True))
                found[key] = nodes, pool.keys[:, slots].clone()
        return drafts, refusals

    proposer.propose = noted
    return found


def draw_depths(engine, seed, deepest):
    """Limits each draft to a depth that depends on the seed, the text and its length."""
    proposer = engine.schedulers["text"]._proposer
    drafts_of = proposer._drafts_of

    def limited(drafter, texts, budgets):
        depths = [
            hash((seed, text.context.id, len(text.context.tokens))) % deepest + 1 for text in texts
        ]
        own = zip(budgets, depths, strict=True)
        return drafts_of(drafter, texts, [replace(b, depth=min(b.depth, d)) for b, d in own])

    proposer._drafts_of = limited


def drawn_requests(name, rng, count):
    """Returns requests with drawn lengths, temperatures, numbers of nodes, rules and trees."""
    requests = []
    for number, prompt in enumerate(prompts(count, seed=int(rng.integers(99)), low=3)):
        params = SamplingParams(
            temperature=float(rng.choice((0.0, 0.7, 1.3))),
            max_tokens=int(rng.integers(8, 24)),
            seed=number,
        )
        nodes = rng.choice((None, 2, 12, 30))
        rule, tree = ("rejection", None) if rng.random() < 0.2 else ("sample", None)
        if rng.random() < 0.15 and drafter_classes()[name].takes_tree:
            tree = STATIC
        wanted = None if nodes is None else int(nodes)
        speculation = Speculation(name, rule, num_tokens=wanted, tree=tree)
        requests.append(TextQuery(prompt, params, speculation, priority=int(rng.integers(3))))
    return requests


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MAKERS)
@torch.inference_mode()
def test_captured_and_launched_drafts_are_equal(kind, seed):
    """Eight texts in few pages: they join, end and are preempted at any time. The depth of each
    draft is drawn.

    The order of the steps may depend on the time, and with it which drafts are made. Several MTP
    modules forget the row before a preemption, so these texts have all pages that they need.
    """
    model, rng, results = shared_model(), np.random.default_rng(seed), []
    sizes = SIZES | {"width": int(rng.integers(2, 5)), "depth": int(rng.integers(3, 6))}
    requests, most_texts = drawn_requests(MAKERS[kind](model).name, rng, 8), rng.permutation(6) + 2
    counted, pages = Counted(), 400 if kind == "mtp-2" else 26
    for recorder in (None, counted):
        drafter = MAKERS[kind](model, seed=5, **sizes)
        engine = engine_with(model, drafter, recorder, pages, sorted(most_texts[:2].tolist()))
        draw_depths(engine, seed, sizes["depth"])
        drafts, scheduler = note_drafts(engine), engine.schedulers["text"]
        futures, most = [engine.submit(request) for request in requests], 0
        while engine.step():
            most = max(most, len(scheduler.preempted))
        texts = [future.result(0).tokens.tolist() for future in futures]
        results.append((texts, drafts))
        assert most > 0 or pages == 400
        assert_no_leak(engine)
        assert_forgotten(drafter)
    (plain_texts, launched), (texts, captured) = results
    for request, one, two in zip(requests, plain_texts, texts, strict=True):
        assert one == two or request.speculation.verifier == "rejection"
    both = launched.keys() & captured.keys()
    assert len(both) > 20
    for key in both:
        assert captured[key][0] == launched[key][0]
        torch.testing.assert_close(captured[key][1], launched[key][1], rtol=1e-3, atol=1e-3)
    counts = engine.stats().graph_drafts
    assert counts["replayed"] == counted.replays > 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "peagle", "dflash", "specformer"])
@torch.inference_mode()
def test_a_replay_is_as_deep_as_its_texts_need(kind, seed):
    """Of the forms of its name the shallowest that has room for their drafts and new states, for
    the most texts that a graph holds.
    """
    model, rng = shared_model(), np.random.default_rng(seed)
    drafter = MAKERS[kind](model, seed=5, **SIZES | {"depth": int(rng.integers(2, 10))})
    texts = sorted(rng.permutation(8)[:3].tolist())
    engine = engine_with(model, drafter, EagerRecorder(), pages=300, texts=[t + 1 for t in texts])
    draw_depths(engine, seed, 9)
    plans = list[tuple[DraftBucket, list[int]]]()
    forms = {(form.name, form.depth) for form in drafter.forms}
    assert len(forms) == len(drafter.forms) and (len(forms) > 2) == (kind in ("eagle3", "mtp"))
    load = DraftGraph.load

    def loaded(graph, planned):
        new = [max(text.plan.depth, text.num_new - 1) for text in planned]
        plans.append((graph.bucket, new))
        return load(graph, planned)

    with mock.patch.object(DraftGraph, "load", loaded):
        engine.run_many(drawn_requests(drafter.name, rng, 8))
    assert len(plans) == engine.stats().graph_drafts["replayed"] > 10
    for bucket, own in plans:
        depths = [form.depth for form in drafter.forms if form.name == bucket.form.name] or [99]
        fitting = min(depth for depth in depths if depth >= max(own))
        assert bucket.form.depth == (fitting if bucket.form is not READ else 0)
        assert bucket.texts == min([t + 1 for t in texts if t + 1 >= len(own)])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@torch.inference_mode()
def test_fewer_levels_compute_fewer_rows(kind):
    """Rows of the network and of its logits, for eight texts with trees of eight nodes a level."""
    model, rows = shared_model(), Counter()
    drafter = MAKERS[kind](model, seed=5, width=8, depth=6, num_nodes=40)
    engine = engine_with(model, drafter, EagerRecorder(), pages=300, texts=(8,))
    network, read, run = drafter.network, drafter._read_new, drafter._run
    logits = network.logits

    def count(name, function, size):
        def counted(*args):
            rows[name] += size(args[0])
            return function(*args)

        return counted

    drafter._read_new = count("network", read, lambda inputs: inputs.new_tokens.numel())
    drafter._run = count("network", run, len)
    network.logits = count("logits", logits, lambda outputs: outputs[..., 0].numel())
    counts = {}
    for graph in engine.schedulers["text"].drafts.captured:
        if graph.bucket.form.name == "tree" and graph.bucket.greedy:
            rows.clear()
            graph()
            counts[graph.bucket.form.depth] = rows["network"], rows["logits"]
    assert counts == {d: (8 * (d + 1) + 64 * (d - 1), 8 + 64 * (d - 1)) for d in (1, 2, 4, 6)}


@pytest.mark.parametrize("kind", chosen(list(MAKERS), "eagle3", "dspark-rnn", "specformer"))
@torch.inference_mode()
def test_replayed_steps_read_drafts_where_they_lie(kind):
    """Drafts and steps replayed in turns give the texts of launched ones."""
    model, name = shared_model(), MAKERS[kind](shared_model()).name
    steps, counted = (StepShape(24, 1, 12), StepShape(72, 8, 12)), Counted()
    requests = [
        TextQuery(p, SamplingParams(t, max_tokens=14, seed=n), Speculation(name))
        for n, (p, t) in enumerate(zip(prompts(5, low=4), (0.0, 0.9, 1.2, 0.0, 0.8), strict=True))
    ]
    texts = []
    for recorder, own in ((None, ()), (counted, steps)):
        engine = engine_with(model, MAKERS[kind](model, seed=3), recorder, 300, steps=own)
        answers = [engine.run(requests[0]), *engine.run_many(requests)]
        texts.append([answer.tokens.tolist() for answer in answers])
    assert texts[0] == texts[1]
    stats = engine.stats()
    assert stats.graph_steps["replayed"] > 5 and stats.graph_drafts["replayed"] > 5
    assert stats.graph_drafts["size"] == stats.graph_drafts["form"] == 0


@pytest.mark.parametrize("count", [72, pytest.param(128, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_many_texts_replay_by_default(count):
    """Up to 128 texts with seven nodes each: a step is one replay, and their drafts are two."""
    model, drawn = shared_model(), SamplingParams(0.8, max_tokens=5)
    drafter = MAKERS["eagle3"](model, seed=3, width=2, depth=2, num_nodes=7)
    requests = [
        TextQuery(prompt, replace(drawn, seed=number), Speculation(drafter.name))
        for number, prompt in enumerate(prompts(count, low=2, high=5))
    ]
    wanted = undrafted(model, requests)
    engine = engine_with(
        model, drafter, EagerRecorder(), 8 * count, DraftLimits().texts, SHAPES, max_running=128
    )
    answers, stats = engine.run_many(requests), engine.stats()
    assert [answer.tokens.tolist() for answer in answers] == wanted
    assert stats.graph_drafts["replayed"] >= 2 * stats.graph_steps["replayed"] > 2
    for counts in (stats.graph_steps, stats.graph_drafts):
        assert {name for name, count in counts.items() if count} <= {"replayed", "prompt"}


@pytest.mark.parametrize("kind", chosen(list(MAKERS), "eagle3", "dspark-rnn", "specformer"))
@torch.inference_mode()
def test_a_draft_without_new_states_repeats_the_last(kind):
    """What a drafter keeps of a text on the device is what its last states gave."""
    model, compared = shared_model(), 0
    drafter = MAKERS[kind](model, seed=5, **SIZES)
    draft = drafter.draft

    def twice(inputs, form):
        nonlocal compared
        first = draft(inputs, form)
        if first is None:
            return None
        again = draft(replace(inputs, new_counts=torch.zeros_like(inputs.new_counts)), form)
        own = torch.arange(first[0].shape[1]) < inputs.num_nodes[:, None]
        for one, two in zip(first, again, strict=True):
            assert torch.equal(one[own], two[own])
        compared += int(own.any(1).sum())
        return first

    drafter.draft = twice
    engine = engine_with(model, drafter, EagerRecorder(), pages=300)
    rng = np.random.default_rng(2)
    engine.run_many(drawn_requests(drafter.name, rng, 4))
    assert compared > 10


@pytest.mark.parametrize(
    "kind,captured",
    [
        ("eagle3", True),
        ("eagle3", False),
        ("dspark-rnn", True),
        ("specformer", True),
        ("draft-model", True),
        ("draft-model", False),
        pytest.param("dflash2", True, marks=pytest.mark.slow),
        pytest.param("windows", True, marks=pytest.mark.slow),
    ],
)
def test_a_drafted_step_waits_once(kind, captured, force_kernels):
    """On a pretended device: for the accepted tokens, and for nothing else."""
    force_kernels("torch")
    model = drawn_model(1)
    with PretendCuda() as device:
        drafter = MAKERS[kind](model, seed=3)
        model.to("cuda")
        drafter.network.to("cuda")
        recorder = Counted(lambda step: step) if captured else None
        engine = engine_with(model, drafter, recorder, 400)
        tree = [
            TextQuery(p, SamplingParams(0.8, max_tokens=12), Speculation(drafter.name))
            for p in prompts(3, low=4)
        ]
        shape = STATIC if drafter.takes_tree else None
        static = TextQuery(
            prompts(1)[0], SamplingParams(max_tokens=12), Speculation(drafter.name, tree=shape)
        )
        for request in [*tree, static]:
            engine.submit(request)
        waits = []
        while engine.step():
            waits.append((device.counts(), device.table()))
            device.syncs.clear()
        drafts = engine.stats().graph_drafts
    assert len(waits) > 6
    for counts, table in waits[1:-1]:
        assert set(counts) <= {"read"}, table
        assert counts["read"] <= 1, table
    assert not captured or (drafts["replayed"] > 4 and (drafts["form"] > 4) == drafter.takes_tree)
