"""Forward passes that fail: a request fails alone, and an engine that cannot go on says so."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from recserve.core.errors import DeadlineExceeded, EngineStopped
from recserve.core.finite import NotFinite
from recserve.core.request import SlateQuery
from recserve.engine import scheduler as scheduler_module
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import StepTimer
from recserve.engine.engine_config import EngineConfig
from recserve.engine.request_queue import Departures
from recserve.engine.runner import DeviceLost, Runner
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import covering, thin
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.text_engines import MAKERS, assert_no_leak, engine_for, prompts
from tests.support.text_plain import drawn_model


def slates(number):
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    queries = [
        SlateQuery(prefix=draw_prefix(model, 4 + i, i), trie=trie, k=3, beam_width=3)
        for i in range(number)
    ]
    engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=4 * 2**20))
    return model, engine, queries


def run(engine):
    while engine.step():
        pass


def fail_with(monkeypatch, poison, times=None):
    """Makes forward passes fail whose tokens satisfy `poison`; at most `times` of them."""
    forward, failed = Runner.forward, []

    def broken(self, pieces, aux_states=None):
        if (times is None or len(failed) < times) and poison(pieces):
            failed.append(len(pieces))
            raise RuntimeError("broken kernel")
        return forward(self, pieces, aux_states)

    monkeypatch.setattr(Runner, "forward", broken)
    return failed


@pytest.mark.parametrize("how", ["not finite", "late"])
def test_one_result_that_fails_holds_back_no_other_of_its_step(how, monkeypatch):
    """Three requests end in one step. The first two fail, and the third is answered."""
    _, engine, requests = slates(3)
    futures = [engine.submit(request) for request in requests]
    scheduler = engine.schedulers["recommender"]
    while not scheduler.batches:
        engine.step()
    (batch,) = scheduler.batches
    first = batch.sequences[:2]
    if how == "not finite":
        for sequence in first:
            sequence.nonfinite = True
    else:
        late = [sequence.request for sequence in first]
        monkeypatch.setattr(
            scheduler_module, "has_expired", lambda request: any(request is one for one in late)
        )
    run(engine)
    assert all(future.done() for future in futures)
    wanted = NotFinite if how == "not finite" else DeadlineExceeded
    assert all(isinstance(future.exception(0), wanted) for future in futures[:2])
    assert futures[2].exception(0) is None and len(futures[2].result().rows)


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_request_that_breaks_the_forward_fails_alone(monkeypatch, place):
    _, engine, queries = slates(7)
    expected = [engine.run(query).rows.tolist() for query in queries]
    engine.forget_all()
    length = len(queries[place].prefix.inputs)  # every prefix has another length
    fail_with(monkeypatch, lambda pieces: length in [len(p.inputs) for p in pieces])
    futures = [engine.submit(query) for query in queries]
    run(engine)
    for number, future in enumerate(futures):
        if number == place:
            with pytest.raises(RuntimeError, match="broken kernel"):
                future.result(0)
        else:
            assert future.result(0).rows.tolist() == expected[number]
    stats = engine.stats()
    assert stats.running == 0 and stats.pages_free + stats.pages_cached == stats.pages_total


@pytest.mark.parametrize("nth", range(4))
def test_one_failed_step_fails_nobody(monkeypatch, nth):
    _, engine, queries = slates(6)
    expected = [engine.run(query).rows.tolist() for query in queries]
    engine.forget_all()
    seen = []
    fail_with(monkeypatch, lambda pieces: seen.append(1) or len(seen) > nth, times=1)
    futures = [engine.submit(query) for query in queries]
    run(engine)
    assert [future.result(0).rows.tolist() for future in futures] == expected


def test_an_admission_that_fails_fails_alone_and_leaks_no_page(monkeypatch):
    """The copy of a partly filled page fails once, as without memory."""
    model = drawn_model(1)
    engine = engine_for(model)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    prompt = prompts(1, low=18, high=19)[0]
    queries = [TextQuery(prompt[:length], params) for length in (11, 15, 18)]
    expected = [engine.run(query).tokens.tolist() for query in queries[:1]]
    pool, failed = engine.schedulers["text"].runner.pool, []
    copy_slots = pool.copy_slots

    def broken(source, target):
        if not failed:
            failed.append(len(source))
            raise RuntimeError("no memory")
        copy_slots(source, target)

    monkeypatch.setattr(pool, "copy_slots", broken)
    futures = [engine.submit(query) for query in (queries[1], queries[0])]
    run(engine)
    assert failed
    with pytest.raises(RuntimeError, match="no memory"):
        futures[0].result(0)
    assert [futures[1].result(0).tokens.tolist()] == expected
    assert_no_leak(engine)


def test_no_request_joins_while_suspects_are_tried(monkeypatch):
    _, engine, queries = slates(5)
    failed = fail_with(monkeypatch, lambda pieces: len(pieces) > 1)
    futures = [engine.submit(query) for query in queries[:4]]
    engine.step()
    late = engine.submit(queries[4])
    engine.step()
    assert not late.done() and engine.stats().queue_depth == 1
    run(engine)
    assert failed and all(future.result(0).rows.size for future in (*futures, late))


def texts(number):
    params = SamplingParams(temperature=0.9, max_tokens=12, repetition_penalty=1.3)
    return [
        TextQuery(
            prompt=prompt, params=replace(params, seed=i), speculation=Speculation("d", "sample")
        )
        for i, prompt in enumerate(prompts(number, low=3, high=15))
    ]


@pytest.mark.parametrize(
    "nth,drafter",
    thin(covering((0, 1, 4), ("ngram", "eagle3", "lookahead", "mask_tokens", "specformer")), 2),
)
def test_texts_go_on_after_a_failed_step_with_the_same_tokens(monkeypatch, drafter, nth):
    model = drawn_model(1)
    queries = texts(5)
    engine = engine_for(model, drafters={"d": MAKERS[drafter](model)})
    futures = [engine.submit(query) for query in queries]
    run(engine)
    expected = [future.result(0).tokens.tolist() for future in futures]
    pieces_of_texts = [[] for _ in queries]

    def listener(pieces):
        return lambda commit: pieces.extend(commit.tokens)

    listening = [
        replace(query, on_commit=listener(pieces))
        for query, pieces in zip(queries, pieces_of_texts, strict=True)
    ]
    engine = engine_for(model, drafters={"d": MAKERS[drafter](model)})
    seen = []
    fail_with(monkeypatch, lambda pieces: seen.append(1) or len(seen) > nth, times=1)
    futures = [engine.submit(query) for query in listening]
    run(engine)
    assert [future.result(0).tokens.tolist() for future in futures] == expected
    assert pieces_of_texts == expected
    assert_no_leak(engine)


def test_a_text_that_breaks_the_forward_fails_alone(monkeypatch):
    model = drawn_model(1)
    queries = [replace(query, prompt=np.arange(3 + i)) for i, query in enumerate(texts(4))]
    engine = engine_for(model, drafters={"d": MAKERS["ngram"](model)})
    expected = []
    for query in queries:
        future = engine.submit(query)
        run(engine)
        expected.append(future.result(0).tokens.tolist())
    engine = engine_for(model, drafters={"d": MAKERS["ngram"](model)})
    scheduler = engine.schedulers["text"]

    def poisoned(_):
        return any(len(s.request.prompt) == 5 for s in scheduler.running)

    fail_with(monkeypatch, poisoned)
    futures = [engine.submit(query) for query in queries]
    run(engine)
    with pytest.raises(RuntimeError, match="broken kernel"):
        futures[2].result(0)
    kept = [f.result(0).tokens.tolist() for i, f in enumerate(futures) if i != 2]
    assert kept == [tokens for i, tokens in enumerate(expected) if i != 2]
    assert_no_leak(engine)


def test_what_fails_before_the_forward_fails_alone_too(monkeypatch):
    """An error of `settle` ended the engine's thread."""
    _, engine, queries = slates(2)
    scheduler = engine.schedulers["recommender"]
    settle, calls = scheduler.settle, []

    def broken():
        calls.append(1)
        if len(calls) == 1:
            raise IndexError("broken settle")
        return settle()

    monkeypatch.setattr(scheduler, "settle", broken)
    engine.start()
    futures = [engine.submit(query) for query in queries]
    assert all(future.result(30).rows.size for future in futures)
    assert engine.alive
    engine.close()


def test_a_lost_device_ends_the_thread_and_every_request(monkeypatch):
    _, engine, queries = slates(4)

    def lost(_):
        raise DeviceLost("the CUDA device is lost")

    fail_with(monkeypatch, lambda _: True)
    monkeypatch.setattr(Runner, "check_device", lost)
    with engine.held():
        futures = [engine.submit(query) for query in queries]
        engine.start()
    for future in futures:
        with pytest.raises(EngineStopped):
            future.result(30)
    assert not engine.alive and isinstance(engine.stopped_by, DeviceLost)
    with pytest.raises(EngineStopped):
        engine.submit(queries[0])
    engine.close()


def test_a_hanging_step_shows(monkeypatch):
    _, engine, queries = slates(1)
    hangs, go_on = threading.Event(), threading.Event()
    forward = Runner.forward

    def slow(self, pieces, aux_states=None):
        hangs.set()
        go_on.wait(30)
        return forward(self, pieces, aux_states)

    monkeypatch.setattr(Runner, "forward", slow)
    engine.start()
    assert engine.stalled_s == 0
    future = engine.submit(queries[0])
    assert hangs.wait(30) and engine.stalled_s > 0
    go_on.set()
    assert future.result(30).rows.size
    engine.close()
    assert engine.stalled_s == 0


def test_step_watch_counts_from_the_last_sign_of_progress():
    now = [10.0]
    timer = StepTimer(lambda: now[0])
    assert timer.seconds == 0
    timer.note_step()
    now[0] = 13.0
    assert timer.seconds == 3
    timer.note_step()
    assert timer.seconds == 0
    timer.idle()
    now[0] = 99.0
    assert timer.seconds == 0


def test_retry_after_follows_what_left_the_queue_lately():
    """Also requests that were late or cancelled make room; slow ones of long ago do not count."""
    departures = Departures()
    assert departures.seconds_for(100, 0.0) == departures.window_s
    for tenth in range(10):
        departures.add(20, 1000 + tenth / 10)
    assert departures.seconds_for(1000, 1001.0) == pytest.approx(500 / 200)
    assert departures.seconds_for(1000, 1010.0) == departures.window_s
    departures.add(1, 2000.0)
    assert departures.seconds_for(1_000_000, 2004.0) == 60
