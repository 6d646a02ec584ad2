"""Prefills in fixed shapes: the states and the cache of those that are launched as they come."""

import numpy as np
import pytest
import torch

from recserve.engine.capture import (
    EagerRecorder,
    PrefillBucket,
    PrefillGraph,
    PrefillGraphs,
)
from recserve.engine.kv_cache import KVCache
from recserve.engine.runner import Runner
from recserve.engine.text_scheduler import TextLimits
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.metrics import Metrics
from recserve.models.adapters import DecoderAdapter
from recserve.models.inputs import NodeInputs
from recserve.service.service import gauges_of
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.device_worlds import assert_same, recommending
from tests.support.pretend_cuda import PretendCuda
from tests.support.recorded_steps import POISON, Counted, with_graphs
from tests.support.text_engines import assert_no_leak, engine_for
from tests.support.text_plain import VOCABULARY, drawn_model, plain

BUCKETS = (PrefillBucket(6), PrefillBucket(17))


def runner_of(model):
    """A runner over a pool of poison values, as pages hold that nobody has written."""
    adapter = DecoderAdapter(model)
    pool = KVPool(adapter.kv_shape, 12, 4, adapter.dtype, adapter.device)
    pool.keys.fill_(POISON)
    pool.values.fill_(POISON)
    return Runner(adapter, pool)


def piece_of(tokens, kv, start, states):
    """Tokens from `start` on, below those before them in row 1 of the slot table."""
    own = NodeInputs(tokens[start:])
    prefixes = Prefixes(kv.slots, [kv.width], [start])
    slots = kv.slots[1, start : len(tokens)]
    return TreeBatch(chain(own.tokens), None, slots, prefixes, inputs=own, num_states=states)


@pytest.mark.parametrize("kind", ["items", "codes", "text"])
@torch.inference_mode()
def test_replays_compute_what_is_launched(kind):
    """Any number of rows under any prefix, after others; more rows than any graph holds."""
    model = drawn_model(1) if kind == "text" else recommending("cpu", kind).model
    g = torch.Generator().manual_seed(0)
    launched, replaying = runner_of(model), runner_of(model)
    kv = KVCache(replaying.pool)
    graphs = PrefillGraphs(replaying, kv, model, EagerRecorder(), buckets=BUCKETS)
    tokens = torch.randint(0, 12, (30,), generator=g)
    kv.slots[1, :30] = torch.randperm(48, generator=g)[:30]
    cases = [(0, 5, 1), (5, 6, 1), (6, 9, 3), (9, 10, 1), (10, 26, 2), (0, 3, 3), (3, 20, 1)]
    for start, stop, states in cases:
        pieces = [piece_of(tokens[:stop], kv, start, states) for _ in range(2)]
        found = graphs.replay(pieces[0])
        if found is None:
            (found,) = replaying.forward(pieces[:1])
        made = found, launched.forward(pieces[1:])[0]
        assert made[0].shape == made[1].shape
        torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
    replayed = [stop - start < 17 for start, stop, _ in cases]
    assert graphs.counts["replayed"] == sum(replayed) == len(cases) - 1
    own = torch.arange(48)  # without the spare page
    for pool in ("keys", "values"):
        one, other = (getattr(r.pool, pool)[:, own] for r in (launched, replaying))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_is_no_chain_is_launched():
    model = drawn_model(1)
    runner, tokens = runner_of(model), torch.arange(4)
    kv = KVCache(runner.pool)
    kv.slots[1, :4] = tokens
    graphs = PrefillGraphs(runner, kv, model, EagerRecorder(), buckets=BUCKETS)
    assert graphs.replay(piece_of(tokens, kv, 0, None)) is None
    assert graphs.replay(piece_of(tokens, kv, 0, 1)) is not None
    assert graphs.counts == {"replayed": 1, "company": 0, "size": 1}


def test_a_replay_waits_for_nothing(force_kernels):
    force_kernels("torch")
    with PretendCuda() as device, torch.inference_mode():
        model = drawn_model(1).to("cuda")
        runner, tokens = runner_of(model), torch.arange(9, device="cuda")
        kv = KVCache(runner.pool)
        kv.slots[1, :9] = tokens
        graph = PrefillGraph(runner, kv, model, PrefillBucket(17))
        piece = piece_of(tokens, kv, 4, 1)
        graph()
        device.syncs.clear()
        graph.load(piece, model.tokens(piece.inputs.tokens))
        graph()
        assert not device.syncs, device.table()


def with_prefills(world):
    """Captures the prefills of a world's engine."""
    scheduler = world.engine.schedulers["recommender"]
    scheduler.prefills = PrefillGraphs(
        scheduler.runner,
        scheduler.kv,
        world.model,
        EagerRecorder(),
        buckets=(PrefillBucket(17), PrefillBucket(65)),
    )
    return scheduler.prefills


@pytest.mark.parametrize("strategy", ["beam", "nezha"])
def test_engines_answer_alike_with_replayed_prefills(strategy):
    """Histories of several lengths, one of them twice; `nezha` has placeholders behind them."""
    launching, world = recommending("cpu", "codes"), recommending("cpu", "codes")
    graphs = with_prefills(world)
    both = launching.ask(strategy, events=(5, 6))
    for events in (2, 9, 2, 12):
        asked = launching.ask(strategy, events=(events,))
        assert_same(world.engine.run_many(asked), launching.engine.run_many(asked))
    assert graphs.counts["replayed"] >= 3  # one of the four may be cached
    assert_same(world.engine.run_many(both), launching.engine.run_many(both))
    assert graphs.counts["company"] == 1


@pytest.mark.parametrize("steps", [False, True], ids=["launched-steps", "replayed-steps"])
def test_texts_are_alike_with_replayed_prefills(steps):
    """Prompts alone and beside running texts, in one chunk and in several, some of them twice."""
    model, g = drawn_model(1), np.random.default_rng(7)
    engine = with_graphs(model, Counted()) if steps else engine_for(model)
    scheduler = engine.schedulers["text"]
    scheduler.limits = TextLimits(prefill_tokens=8)
    scheduler.prefills = graphs = PrefillGraphs(
        scheduler.runner, scheduler.kv, model, EagerRecorder(), buckets=BUCKETS
    )
    queries = [
        TextQuery(g.integers(0, VOCABULARY, size), SamplingParams(seed=size, max_tokens=5))
        for size in (5, 21, 2, 13, 3, 4)
    ]
    for some in ([0], [1], [2, 1], [3, 0, 2], [4, 5]):
        answers = engine.run_many([queries[number] for number in some])
        for number, answer in zip(some, answers, strict=True):
            wanted = plain(model, queries[number].prompt.tolist(), queries[number].params)[0]
            assert answer.tokens.tolist() == wanted
    assert graphs.counts["replayed"] >= 4 and graphs.counts["company"] >= 1
    assert engine.stats().graph_prefills == graphs.counts
    assert_no_leak(engine)


def test_prefills_are_counted():
    """By their outcome, with the time and the memory of each capture."""
    world = recommending("cpu", "codes")
    with_prefills(world)
    world.engine.run_many(world.ask("beam", events=(2,)))
    world.engine.run_many(world.ask("beam", events=(3, 4)))
    stats = world.engine.stats()
    assert stats.graph_prefills == {"replayed": 1, "company": 1, "size": 0}
    assert set(stats.graph_seconds) == set(stats.graph_bytes) == {"prefill 16", "prefill 64"}
    page = Metrics((), (), lambda: gauges_of(stats)).page().decode()
    assert 'recserve_graph_prefills_total{result="company"} 1.0' in page
    assert 'recserve_graph_record_seconds{bucket="prefill 16"}' in page


def test_a_cpu_captures_no_prefills():
    assert recommending("cpu").engine.stats().graph_prefills == {}
