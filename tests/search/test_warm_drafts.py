"""Drafts made before anybody asks: one round, beam search's answer, and no request kept waiting."""

import time
from dataclasses import replace

import numpy as np
import pytest

from recserve.core.allowed import AllowedItems
from recserve.core.request import (
    DeadlineExceeded,
    QueueFull,
    RecommendRequest,
    RootKeys,
    WarmDraftRequest,
    Warmed,
    WarmRequest,
)
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.search.heads import Heads
from recserve.search.strategies import speculative
from tests.support.draft_heads import make_head
from tests.support.recommenders import CATALOGUES, FORMS, draw_root, make

SMALL = EngineConfig(kv_bytes=16 * 2**20)


def make_engine(form="items", normalization="children", codes="ordinary", config=SMALL):
    model, trie = make(CATALOGUES[codes], form, normalization)
    return (
        build_engine(EngineModels(model, heads=Heads(make_head(model, "from-target"))), config),
        model,
        trie,
    )


def warmed(request: RecommendRequest) -> WarmDraftRequest:
    fields = {n: v for n, v in vars(request).items() if n != "strategy"}
    return WarmDraftRequest(**fields)


@pytest.fixture
def no_head(monkeypatch):
    """Whoever asks the head for a draft fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("the head was asked for a draft")

    monkeypatch.setattr(speculative, "likely_prefixes", refuse)


@pytest.mark.parametrize("form,normalization", FORMS)
@pytest.mark.parametrize("codes", CATALOGUES)
def test_the_first_answer_takes_one_round_and_is_beam_search_s(no_head, form, normalization, codes):
    engine, model, trie = make_engine(form, normalization, codes)
    rng = np.random.default_rng(0)
    for number, (k, width) in enumerate(((1, 1), (3, 3), (5, 10), (10, 40))):
        request = RecommendRequest(
            draw_root(model, 1 + 2 * number, number),
            trie,
            k,
            width,
            "speculative",
            excluded=rng.integers(0, trie.num_items, number) if codes == "ordinary" else None,
            dense_weight=0.5 * (number % 2) if form == "items" else 0.0,
        )
        assert isinstance(engine.run(warmed(request)), Warmed)
        slate = engine.run(request)
        plain = engine.run(replace(request, strategy="beam"))
        assert slate.rounds <= 1 <= plain.rounds or plain.rounds == slate.rounds == 0
        assert slate.exact and slate.rows.tolist() == plain.rows.tolist()
        np.testing.assert_allclose(slate.scores, plain.scores, atol=2e-5)
        assert slate.timing.nodes <= plain.timing.nodes
        if codes == "ordinary" and width == 40:
            assert slate.rounds == 1 < plain.rounds


def test_what_is_kept_is_what_the_proof_needs():
    """As much as is left after the same question twice; a second warming computes nothing."""
    engine, model, trie = make_engine()
    asked = RecommendRequest(draw_root(model, 9, 0), trie, 5, 20, "speculative")
    made = engine.run(warmed(asked))
    again = engine.run(warmed(asked))
    assert made.timing.nodes > 0 == again.timing.nodes and again.timing.root_computed == 0
    slate = engine.run(asked)
    engine.forget(RootKeys(asked.root.keys))
    learned = [engine.run(asked).timing.nodes for _ in range(3)]
    assert slate.timing.nodes == learned[2] <= learned[1]


def test_another_question_is_answered_as_if_nothing_were_kept():
    """Another k, exclusion, filter or catalogue version: beam search's slate."""
    engine, model, trie = make_engine()
    asked = RecommendRequest(draw_root(model, 9, 0), trie, 5, 20, "speculative")
    allowed = np.zeros(trie.num_rows, dtype=bool)
    allowed[::3] = True
    engine.run(warmed(asked))
    for other in (
        replace(asked, k=6),
        replace(asked, excluded=np.arange(9)),
        replace(asked, allowed=AllowedItems.of(allowed)),
        replace(asked, trie=replace(trie)),
    ):
        slate, plain = engine.run(other), engine.run(replace(other, strategy="beam"))
        assert slate.exact and slate.rows.tolist() == plain.rows.tolist()
        np.testing.assert_allclose(slate.scores, plain.scores, atol=2e-5)
    engine.forget(RootKeys(asked.root.keys))
    engine.run(warmed(replace(asked, allowed=AllowedItems.of(allowed))))
    found = engine.schedulers["recommender"].cache.match(asked.root.keys)
    assert found.tail is not None and found.notes.draft is None


def test_a_request_that_somebody_waits_for_goes_first():
    """Background work stops between two of its rounds, and goes on when the answer is out."""
    engine, model, trie = make_engine()
    asked = [RecommendRequest(draw_root(model, 9, i), trie, 5, 20) for i in range(4)]
    behind = [engine.submit(warmed(request)) for request in asked[:3]]
    engine.step()
    engine.step()
    (running,) = engine.background["recommender"].cohorts
    rounds = running.sequences[0].timing.forwards
    assert rounds >= 1 and not behind[0].done()
    live = engine.submit(asked[3])
    while not live.done():
        assert running.sequences[0].timing.forwards == rounds
        engine.step()
    assert live.result().rows.tolist() == engine.run(asked[3]).rows.tolist()
    while engine.step():
        pass
    assert all(isinstance(future.result(), Warmed) for future in behind)


def test_one_at_a_time_is_begun():
    """However many wait, a live request meets a forward of no more than one of them."""
    engine, model, trie = make_engine()
    requests = [warmed(RecommendRequest(draw_root(model, 9, i), trie, 5, 9)) for i in range(5)]
    requests += [WarmRequest(draw_root(model, 30, i), "recommender") for i in range(5, 9)]
    futures = [engine.submit(request) for request in requests]
    while engine.step():
        assert engine.background["recommender"].num_running <= 1
        waiting = sum(not future.done() for future in futures)
        assert engine.stats().background == waiting
    assert all(future.done() for future in futures)


def test_the_background_fills_its_own_queue_and_is_dropped_when_too_late():
    engine, model, trie = make_engine(config=replace(SMALL, max_queue=2))
    asked = RecommendRequest(draw_root(model, 9, 0), trie, 5, 9)
    late = replace(warmed(asked), deadline_s=time.monotonic() - 1)
    behind = [engine.submit(late), engine.submit(warmed(asked))]
    with pytest.raises(QueueFull):
        engine.submit(warmed(asked))
    assert engine.stats().queue_depth == 0 and engine.stats().background == 2
    live = engine.submit(asked)
    while engine.step():
        pass
    assert live.result().rows.size == 5 and isinstance(behind[1].result(), Warmed)
    with pytest.raises(DeadlineExceeded):
        behind[0].result()


def test_a_closing_engine_does_not_finish_what_nobody_waits_for():
    engine, model, trie = make_engine()
    asked = [RecommendRequest(draw_root(model, 9, i), trie, 5, 9) for i in range(4)]
    behind = [engine.submit(warmed(request)) for request in asked]
    live = engine.submit(asked[0])
    with engine.held():
        engine.start()
        engine._closing = True
    engine.close()
    assert live.done() and behind[-1].cancelled()


def test_a_deleted_root_leaves_no_page_behind():
    """Cancelled between two rounds: its pages come back, and nothing of it is cached."""
    engine, model, trie = make_engine()
    lane = engine.schedulers["recommender"]
    root = draw_root(model, 9, 0)
    future = engine.submit(warmed(RecommendRequest(root, trie, 5, 20)))
    engine.step()
    engine.step()
    assert not future.done()
    engine.cancel(future)
    engine.forget(RootKeys(root.keys))
    while engine.step():
        pass
    assert lane.cache.match(root.keys).length == 0
    assert lane.allocator.num_free == lane.allocator.num_pages


def test_what_is_kept_beside_a_root_is_its_last_state_and_the_nodes_of_its_draft():
    """Also of requests that shared every step: of nothing that the step computed is more kept."""
    engine, model, trie = make_engine()
    asked = [
        RecommendRequest(draw_root(model, n, n), trie, 5, 9, "speculative") for n in range(1, 9)
    ]
    engine.run_many(asked)
    entries = [
        e for e in engine.schedulers["recommender"].cache._entries.values() if e.tail is not None
    ]
    assert len(entries) == 8
    for entry in entries:
        nodes = entry.notes.draft.nodes
        assert entry.tail.untyped_storage().nbytes() == 4 * model.config.decoder.hidden_size
        assert entry.ahead is None
        assert nodes.untyped_storage().nbytes() == 8 * nodes.numel() > 0


def test_an_engine_says_what_it_would_answer_from_a_kept_draft():
    engine, model, trie = make_engine()
    asked = warmed(RecommendRequest(draw_root(model, 9, 0), trie, 5, 9))
    assert engine.repeats(asked) and not engine.repeats(replace(asked, strategy="beam"))
    assert not engine.repeats(
        replace(asked, allowed=AllowedItems.of(np.ones(trie.num_rows, dtype=bool)))
    )
    bare = build_engine(EngineModels(model), SMALL)
    assert not bare.repeats(asked)
    with pytest.raises(ValueError, match="choose one of"):
        bare.submit(asked)
