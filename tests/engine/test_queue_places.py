"""The queue: a bound for each model, a share for each client, and bodies that enter whole."""

import random
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve.core.client import Client
from recserve.core.errors import QueueFull, TooManyQueries
from recserve.core.futures import wait_all
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.request_queue import Places
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.text_engines import engine_for, shared_model
from tests.support.text_queries import prompt_query

CLIENTS = (b"", b"one", b"two", b"three")


def text(**fields) -> TextQuery:
    return TextQuery(np.arange(1, 6), SamplingParams(temperature=0, max_tokens=4), **fields)


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 40),
    share=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    moves=st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(-9, 9)), max_size=60),
)
def test_places(capacity, share, moves):
    """The bound holds, a client keeps to its share, and one without a place gets any free one."""
    places = Places(capacity, share)
    for client, count in moves:
        own = places.taken_by.get(client, 0)
        if count < 0:
            for _ in range(min(own, -count)):
                places.leave(client)
            continue
        others = places.num_taken - own
        try:
            places.check(client, count)
        except (QueueFull, TooManyQueries):
            assert count and (count > 1 or own or places.num_taken == capacity)
            continue
        for _ in range(count):
            places.take(client)
        assert sum(places.taken_by.values()) == places.num_taken <= capacity
        assert not (client and count) or own + count <= max(1, share * (capacity - others))


def test_a_client_is_told_about_its_share():
    engine = engine_for(shared_model(), max_queue=8)
    one, two, three = map(Client, CLIENTS[1:])
    engine.submit_all([text()] * 4, one)
    for refused in (lambda: engine.submit(text(), one), lambda: engine.check_queue(["text"], one)):
        with pytest.raises(QueueFull, match=r"4 requests of this client .* 4 of 8 .*queue_share"):
            refused()
    with pytest.raises(TooManyQueries, match=r"needs 5 places .* at most 4 .*max_queue 8"):
        engine.submit_all([text()] * 5, one)
    engine.submit_all([text()] * 2, two)
    engine.submit(text(), three)
    engine.submit(text())
    with pytest.raises(QueueFull, match="8 requests wait for this model; .* 8 places"):
        engine.submit(text())
    while engine.step():
        pass
    engine.submit_all([prompt_query([1, 2, 3], 1), text(), prompt_query([4], mean=True)], one)
    with pytest.raises(QueueFull, match="3 requests of this client"):
        engine.submit_all([prompt_query([5], 1), text()], one)
    assert len(engine.queue) == 3


BAD = {
    "drafter": text(speculation=Speculation("unknown")),
    "empty": TextQuery(np.arange(0), SamplingParams(max_tokens=1)),
    "stop": TextQuery(np.arange(1, 6), SamplingParams(stop_token_ids=(2**31,))),
    "large": prompt_query(range(3000), mean=True),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bad", BAD)
def test_a_refused_query_leaves_none_of_its_body(bad, seed):
    rng, engine = random.Random(seed), engine_for(shared_model(), max_queue=20)
    before = engine.submit(text())
    kinds = (text(), prompt_query([1, 2, 3], 2), prompt_query([4, 5], mean=True))
    body = rng.choices(kinds, k=rng.randrange(1, 12))
    body.insert(rng.randrange(len(body) + 1), BAD[bad])
    with pytest.raises(ValueError):
        engine.submit_all(body)
    assert [one.future for one in engine.queue.waiting] == [before] and not before.cancelled()
    with pytest.raises(QueueFull, match="needs 20 places"):
        engine.submit_all(rng.choices(kinds, k=20))
    assert len(engine.queue) == engine.stats().queue_depth == 1


def test_models_have_queues_of_their_own():
    """Texts and prompts to score share that of the language model."""
    recommender, trie = make(CATALOGUES["ordinary"], "codes", "children")
    models = EngineModels(recommender, text=shared_model())
    engine = build_engine(models, EngineConfig(page_size=4, max_queue=4, kv_bytes=2**20))
    engine.submit_all([text(), prompt_query([1, 2], 1), text(), prompt_query([3], mean=True)])
    for query in (text(), prompt_query([1], 1)):
        with pytest.raises(QueueFull):
            engine.submit(query)
    with pytest.raises(QueueFull):
        engine.check_queue(["text"])
    engine.check_queue(["recommender"])
    engine.check_queue(["ranker", "recommender"])
    slates = [
        SlateQuery(prefix=draw_prefix(recommender, 5, n), trie=trie, k=3, beam_width=3)
        for n in range(4)
    ]
    futures = engine.submit_all(slates)
    with pytest.raises(QueueFull) as refused:
        engine.check_queue(["ranker", "recommender"])
    assert refused.value.retry_after_s > 0 and len(engine.queue) == 8
    while engine.step():
        pass
    assert all(len(slate.rows) == 3 for slate in wait_all(futures))


def test_the_bound_holds_while_requests_are_admitted():
    """Each request that is admitted makes room for one, whoever asks meanwhile."""
    engine = engine_for(shared_model(), max_queue=6, max_running=4)
    scheduler = engine.schedulers["text"]
    admit, depths, added = scheduler.admit, [], []

    def watched(sequence):
        depths.append(len(engine.queue))
        try:
            added.append(engine.submit(text()))
        except QueueFull:
            added.append(None)
        return admit(sequence)

    futures = engine.submit_all([text()] * 6)
    scheduler.admit = watched
    engine.step()
    assert depths == [6, 6 - 1, 6 - 1, 6 - 1] and added[0] is None and None not in added[1:]
    assert len(engine.queue) == 5
    scheduler.admit = admit
    while engine.step():
        pass
    wait_all([*futures, *added[1:]])


def test_one_failure_cancels_the_other_results():
    futures = [Future[int]() for _ in range(3)]
    futures[0].set_result(1)
    futures[1].set_exception(OSError("broken"))
    with pytest.raises(OSError):
        wait_all(futures)
    assert futures[2].cancelled()
