"""Prefills that no client waits for: live requests go first, and nothing is left behind."""

import time
from dataclasses import replace

import pytest

from recserve.core.errors import DeadlineExceeded, QueueFull
from recserve.core.request import PrefixKeys, Prewarmed, PrewarmQuery, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.search.strategy import Heads
from tests.support.draft_heads import make_head
from tests.support.recommenders import CATALOGUES, draw_prefix, make

SMALL = EngineConfig(kv_bytes=16 * 2**20)


def make_engine(config=SMALL):
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    heads = Heads(make_head(model, "from-target"))
    return build_engine(EngineModels(model, heads=heads), config), model, trie


def warm(model, number, length=9):
    return PrewarmQuery(draw_prefix(model, length, number), "recommender")


def test_a_live_request_goes_first():
    """Background work stands still while an item request runs, and goes on afterwards."""
    engine, model, trie = make_engine()
    queries = SlateQuery(prefix=draw_prefix(model, 9, 5), trie=trie, k=5, beam_width=20)
    behind = [engine.submit(warm(model, number)) for number in range(3)]
    live = engine.submit(queries)
    while not live.done():
        assert not any(future.done() for future in behind)
        engine.step()
    assert live.result().rows.tolist() == engine.run(queries).rows.tolist()
    while engine.step():
        pass
    assert all(isinstance(future.result(), Prewarmed) for future in behind)


def test_a_warmed_prefix_is_not_computed_again():
    engine, model, trie = make_engine()
    request = warm(model, 0)
    made, again = engine.run(request), engine.run(request)
    assert (
        made.timing.prefix_computed == len(request.prefix.inputs)
        and again.timing.prefix_computed == 0
    )
    slate = engine.run(SlateQuery(prefix=request.prefix, trie=trie, k=5, beam_width=20))
    assert slate.timing.prefix_computed == 0


def test_one_at_a_time_is_begun():
    """However many wait, a live request meets a forward of no more than one of them."""
    engine, model, _ = make_engine()
    futures = [engine.submit(warm(model, number, 9 + number)) for number in range(9)]
    while engine.step():
        assert engine.schedulers["recommender"].num_running <= 1
        waiting = sum(not future.done() for future in futures)
        assert engine.stats().background == waiting
    assert all(future.done() for future in futures)


def test_the_background_fills_its_own_queue_and_is_dropped_when_too_late():
    engine, model, trie = make_engine(config=replace(SMALL, max_queue=2))
    late = replace(warm(model, 0), deadline_s=time.monotonic() - 1)
    behind = [engine.submit(late), engine.submit(warm(model, 1))]
    with pytest.raises(QueueFull):
        engine.submit(warm(model, 2))
    assert engine.stats().queue_depth == 0 and engine.stats().background == 2
    live = engine.submit(SlateQuery(prefix=draw_prefix(model, 9, 0), trie=trie, k=5, beam_width=9))
    while engine.step():
        pass
    assert live.result().rows.size == 5 and isinstance(behind[1].result(), Prewarmed)
    with pytest.raises(DeadlineExceeded):
        behind[0].result()


def test_a_closing_engine_does_not_finish_its_background():
    engine, model, trie = make_engine()
    behind = [engine.submit(warm(model, number)) for number in range(4)]
    live = engine.submit(SlateQuery(prefix=draw_prefix(model, 9, 0), trie=trie, k=5, beam_width=9))
    with engine.held():
        engine.start()
        engine._closing = True
    engine.close()
    assert live.done() and behind[-1].cancelled()


def test_a_cancelled_prefill_leaves_no_page_behind():
    engine, model, _ = make_engine()
    scheduler = engine.schedulers["recommender"]
    request = warm(model, 0)
    future = engine.submit(request)
    future.cancel()
    engine.forget(PrefixKeys(request.prefix.keys))
    while engine.step():
        pass
    assert scheduler.kv.prefixes.match(PrefixKeys(request.prefix.keys))[1] == 0
    assert scheduler.kv.allocator.num_free == scheduler.kv.allocator.num_pages
