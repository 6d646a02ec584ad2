"""Searches in fixed shapes: recorded once, replayed for other users, versions, widths and filters.

The slates must be those of the searches that are launched as they come. What may not count holds a
number that would be seen in any sum: pages nobody has written, and the spare slot.
"""

import logging
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.kernels import backend
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import build_trie
from recserve.models.item_heads import DraftPlan
from tests.support.device_worlds import ITEMS, SIZES, recommending
from tests.support.grids import chosen
from tests.support.recorded_searches import SHAPES, SOME, assert_same, with_searches
from tests.support.recorded_steps import Counted


@pytest.fixture(autouse=True, scope="module")
def plain_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "FORCED", "torch")
        yield


@pytest.fixture(scope="module", params=chosen(("items", "codes"), "items"))
def worlds(request):
    """One that launches, and two that replay: over the trie as built, over the one that changes."""
    with torch.inference_mode():
        launching = recommending("cpu", request.param)
        made = {}
        for name in ("trie", "live"):
            world, counted = recommending("cpu", request.param), Counted()
            world.trie, world.live = launching.trie, launching.live
            shapes = SOME if name == "trie" else SOME[:2]
            graphs = with_searches(world, getattr(world, name), counted, shapes)
            made[name] = world, graphs, counted
    return request.param, launching, made


def assert_no_leak(engine):
    scheduler = engine.schedulers["recommender"]
    assert (
        scheduler.kv.allocator.num_free + scheduler.kv.prefixes.num_pages
        == scheduler.kv.allocator.num_pages
    )


@pytest.mark.parametrize(
    "strategy,variant",
    [
        pytest.param(strategy, variant, marks=[] if strategy == own else [pytest.mark.slow])
        for strategy in ("beam", "nezha")
        for variant, own in (
            ("plain", ""),
            ("filters", "nezha"),
            ("diversity", "beam"),
            ("weighed", ""),
            ("live", "beam"),
        )
    ],
)
def test_replays_find_what_is_launched(strategy, variant, worlds):
    """Together, alone, and again with the prefix in the prefix cache. What caps leave too short is
    searched again, by a replay too.
    """
    form, launching, made = worlds
    if variant == "weighed" and form == "codes":
        pytest.skip("this form has no dense head")
    world, graphs, counted = made["live" if variant == "live" else "trie"]
    queries = launching.ask(strategy, variant)
    before = dict(graphs.counts), counted.replays
    for requests in (queries, queries[:1], queries[1:], queries):
        assert_same(launching.engine.run_many(requests), world.engine.run_many(requests))
    replayed = graphs.counts["replayed"] - before[0]["replayed"]
    assert replayed >= 4 if variant == "diversity" else replayed == 4
    assert counted.replays - before[1] == replayed
    assert graphs.counts["size"] == before[0]["size"]
    assert_no_leak(world.engine)


def test_widths_and_items_of_their_own(worlds):
    """One beam, fewer items than beams, all there are, and more items wanted than there are."""
    _, launching, made = worlds
    world, graphs, _ = made["trie"]
    for strategy in ("beam", "nezha"):
        queries = launching.ask(strategy, events=(2, 5, 9, 1))
        sizes = [(1, 1), (3, 7), (5, 16), (16, 2)]
        queries = [replace(r, k=k, beam_width=w) for r, (k, w) in zip(queries, sizes, strict=True)]
        before = graphs.counts["replayed"]
        world.engine.forget_all()  # so that they begin together
        assert_same(launching.engine.run_many(queries), world.engine.run_many(queries))
        assert graphs.counts["replayed"] == before + 1


def test_work_is_reported(worlds):
    """Each level but the last is one forward of its beams."""
    _, launching, made = worlds
    world, *_ = made["trie"]
    slate = world.engine.run(launching.ask("beam")[0])
    assert slate.exact and slate.rounds == slate.timing.forwards == 2
    assert slate.timing.nodes == min(8, SIZES[0]) + 8
    slate = world.engine.run(launching.ask("nezha")[0])
    assert not slate.exact and slate.rounds == 1 and slate.timing.forwards == 0


def versions(base, count):
    """Over one base: new ids, some in place of old ones, more and fewer of them, hidden ones."""
    g = torch.Generator().manual_seed(3)
    drawn = torch.stack([torch.randint(0, c, (90,), generator=g) for c in SIZES], 1)
    drawn = torch.unique(drawn, dim=0)[torch.randperm(len(torch.unique(drawn, dim=0)), generator=g)]
    for number in range(count):
        size = [1, 30, 7, 0, 18][number % 5]
        rows = torch.arange(base.num_rows, base.num_rows + size)
        gone = None if number % 2 else torch.tensor([2 * number, 5, 40])
        yield insert_items(base, drawn[:size], rows, base.num_rows + size, gone)


@pytest.mark.parametrize("strategy", chosen(("beam", "nezha"), "beam"))
def test_versions_come_and_go(strategy):
    """The base itself, versions with more and with fewer new ids, back to the base, two at once."""
    with torch.inference_mode():
        launching, world = recommending("cpu", "codes"), recommending("cpu", "codes")
        for one in (launching, world):  # rows of later versions
            one.model.append_items(ITEMS[:40], torch.empty(40, 0), torch.full((40,), -1))
        graphs = with_searches(world, world.trie, shapes=SOME[:2])
    different = [world.trie, *versions(world.trie, 5), world.trie]
    queries = [[replace(r, trie=t) for r in world.ask(strategy)] for t in different]
    found = set()
    for requests in queries:
        wanted = launching.engine.run_many(requests)
        assert_same(wanted, world.engine.run_many(requests))
        found |= {row for slate in wanted for row in slate.rows.tolist()}
    assert graphs.counts == {"replayed": len(different), "size": 0, "version": 0}
    assert max(found) >= world.trie.num_rows  # new items were among them
    mixed = [requests[n % 2] for n, requests in enumerate(queries[:4])]
    assert_same(launching.engine.run_many(mixed), world.engine.run_many(mixed))


def test_what_no_record_holds_is_launched(worlds):
    """Too many beams or new ids, another base: all answered, and counted why."""
    _, launching, made = worlds
    world, graphs, counted = made["trie"]
    wide = [replace(r, beam_width=17) for r in launching.ask("beam")]
    another = build_trie(ITEMS[:50], SIZES)
    other = [replace(r, trie=another) for r in launching.ask("nezha")]
    drawn = torch.cartesian_prod(*(torch.arange(size) for size in SIZES))
    rows = torch.arange(len(drawn)) + world.trie.num_rows
    full = insert_items(world.trie, drawn, rows, world.trie.num_rows + len(drawn))
    fuller = [replace(r, trie=full) for r in launching.ask("beam")]
    before, replays = dict(graphs.counts), counted.replays
    for requests in (wide, other, fuller):
        world.engine.forget_all()
        assert_same(launching.engine.run_many(requests), world.engine.run_many(requests))
    gained = {name: graphs.counts[name] - before[name] for name in before}
    assert gained == {"replayed": 0, "size": 1, "version": 2} and counted.replays == replays


@pytest.mark.parametrize("strategy", ["beam", "nezha"])
@pytest.mark.parametrize("variant", ["plain", "filters", "weighed"])
def test_more_requests_than_a_graph_holds_are_replayed_in_turns(strategy, variant, worlds):
    """Nine requests in graphs of four, four and one; the filters are in the second and third."""
    form, launching, made = worlds
    if variant == "weighed" and form == "codes":
        pytest.skip("this form has no dense head")
    world, graphs, counted = made["trie"]
    plain = launching.ask(strategy, events=(1, 2, 3, 4, 5, 6, 7))
    others = launching.ask(strategy, variant)
    requests = [*plain[:4], others[0], *plain[4:], others[1]]
    widths = (12, 16, 9, 3, 16, 5, 16, 11, 9)
    requests = [replace(r, beam_width=w) for r, w in zip(requests, widths, strict=True)]
    world.engine.forget_all()
    before = graphs.counts["replayed"], counted.replays
    assert_same(launching.engine.run_many(requests), world.engine.run_many(requests))
    assert graphs.counts["replayed"] == before[0] + 1
    assert counted.replays == before[1] + 3
    assert_no_leak(world.engine)


def test_a_long_list_is_read_as_a_bitmap(worlds):
    _, launching, made = worlds
    world, graphs, _ = made["trie"]
    queries = [replace(r, excluded=np.arange(10, 50)) for r in launching.ask("beam")]
    before = graphs.counts["replayed"]
    assert_same(launching.engine.run_many(queries), world.engine.run_many(queries))
    assert graphs.counts["replayed"] == before + 1
    # What was left out is there again.
    plain = launching.ask("beam")
    assert_same(launching.engine.run_many(plain), world.engine.run_many(plain))


def test_another_base_replaces_the_records():
    """As when insertions are folded: requests are answered before, between and after."""
    answered = []

    def record(step):
        # The engine's lock is held: requests come between two records, for as long as one took.
        time.sleep(0.01)
        if graphs is not None:
            answered.append(graphs.counts["replayed"])
        return step

    world, graphs = recommending("cpu"), None
    graphs = with_searches(world, world.trie, record)
    live = world.ask("beam", "live")
    wanted = world.engine.run_many(live)
    assert graphs.counts["version"] == 1
    world.engine.start()
    try:
        recording = threading.Thread(target=world.engine.capture, args=(world.live,))
        recording.start()
        while recording.is_alive():
            assert len(world.engine.run(world.ask("beam")[0]).rows) == 5
        recording.join()
    finally:
        world.engine.close()
    assert len(answered) == len(SHAPES) * 2 and answered[-1] > answered[0]
    before = graphs.counts["replayed"]
    assert_same(wanted, stepped(world.engine, live))
    assert graphs.counts["replayed"] == before + 1
    count = graphs.counts["version"]
    stepped(world.engine, world.ask("beam")[:1])
    assert graphs.counts["version"] == count + 1


def stepped(engine, requests):
    """Answers of an engine that was closed, and is opened again."""
    engine._closing = False
    return engine.run_many(requests)


@pytest.mark.parametrize("kind", [RuntimeError, type("OutOfResources", (Exception,), {})])
def test_a_record_that_fails_ends_the_recording(kind, caplog):
    """What was recorded before it serves, and the engine goes on; Triton's errors are no
    RuntimeErrors.
    """
    made = []

    def record(step):
        made.append(step)
        if len(made) == 3:
            raise kind("out of memory")
        return step

    world = recommending("cpu")
    with caplog.at_level(logging.ERROR):
        graphs = with_searches(world, world.trie, record)
    assert len(graphs.captured) == 2 and "launched one by one" in caplog.text
    assert len(world.engine.run(world.ask("beam")[0]).rows) == 5
    assert graphs.counts["replayed"] == 1
    stats = world.engine.stats()
    assert set(stats.graph_seconds) == {"beam 1x8", "nezha 1x8"}
    assert stats.unrecorded[:2] == ["beam 4x16", "nezha 4x16"] and len(stats.unrecorded) == 14


def test_a_closing_engine_records_no_more():
    world = recommending("cpu")
    graphs = with_searches(world, world.trie, lambda step: step)
    world.engine.close()
    world.engine.capture(world.live)
    assert graphs._trie.base is world.trie


@pytest.mark.parametrize("limits", [{"seconds": -1.0}, {"bytes": -1}])
def test_limits_are_kept(limits, caplog):
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        world = recommending("cpu")
        graphs = with_searches(world, world.trie, **limits)
    assert not graphs.captured and "beam 1x8" in caplog.text
    before = world.engine.run_many(world.ask("beam"))
    assert len(before) == 2 and graphs.counts == {"replayed": 0, "size": 1, "version": 0}


def test_speculation_replays_where_it_drafts_nothing(worlds):
    """And drafts where it does."""
    _, launching, made = worlds
    world, graphs, _ = made["trie"]
    strategy = world.engine._strategies["speculative"]
    queries = launching.ask("speculative")
    world.engine.forget_all()  # where only one prefix is cached the two are searched apart
    for only, replays in ((DraftPlan(0, 0, 0, 0), 1), (DraftPlan(2, 0, 0, 0), 0)):
        before = graphs.counts["replayed"]
        strategy.policy.only = only
        wanted = launching.engine.run_many(launching.ask("beam"))
        assert_same(wanted, world.engine.run_many(queries))
        assert graphs.counts["replayed"] - before == replays
    strategy.policy.only = None
