"""Schedulers that share a KV cache serve one line: small requests cannot starve a large one."""

import random

import numpy as np
import pytest

from recserve.core.request import PromptQuery, TextScoreQuery
from recserve.engine.engine import Engine
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.grids import chosen
from tests.support.text_engines import assert_no_leak, engine_for, shared_model
from tests.support.text_plain import VOCABULARY
from tests.support.text_queries import prefix_of, prompt_query

PAGES, PAGE = 24, 4


@pytest.fixture(scope="module")
def model():
    return shared_model()


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def embedding(rng: random.Random, low: int = 20) -> PromptQuery:
    return prompt_query(drawn(rng, rng.randrange(low, 45)), mean=True)


def large_embedding(rng: random.Random) -> PromptQuery:
    return embedding(rng, 44)


def scoring(rng: random.Random) -> TextScoreQuery:
    root, texts = drawn(rng, rng.randrange(8, 20)), [drawn(rng, 4) for _ in range(5)]
    tokens = np.array([token for text in texts for token in text], np.int64)
    return TextScoreQuery(prefix_of(root), tokens, np.arange(0, 21, 4), (1, 2))


def text(rng: random.Random, num_tokens: int = 12) -> TextQuery:
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    return TextQuery(np.array(drawn(rng, rng.randrange(20, 40))), params)


SMALL = {
    "large": (large_embedding,),
    "embeddings": (embedding,),
    "scores": (scoring,),
    "all": (embedding, scoring, text),
}


def num_steps(engine: Engine, query, stream, rng: random.Random, most: int) -> int:
    """Returns the steps that a request takes beside a stream of others, of which six wait."""
    others = [engine.submit(rng.choice(stream)(rng)) for _ in range(6)] if stream else []
    if others:
        engine.step()
    future = engine.submit(query)
    for step in range(most):
        if future.done():
            return step
        engine.step()
        others = [other for other in others if not other.done()]
        while stream and len(others) < 6:
            others.append(engine.submit(rng.choice(stream)(rng)))
    pytest.fail(f"not done after {most} steps")


@pytest.mark.parametrize("seed", chosen(range(3), "0"))
@pytest.mark.parametrize("small", SMALL)
def test_a_stream_of_small_requests_does_not_starve_a_large_text(small, seed, model):
    """The text grows from 11 to 16 of 24 pages. A few steps for each of them are enough."""
    rng = random.Random(seed)
    query = TextQuery(np.array(drawn(rng, 40)), SamplingParams(temperature=0, max_tokens=40))
    alone = num_steps(engine_for(model, PAGES), query, (), rng, 60)
    engine = engine_for(model, PAGES)
    assert num_steps(engine, query, SMALL[small], rng, 5 * alone) >= alone
    while engine.step():
        pass
    assert_no_leak(engine)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_of_texts_does_not_starve_a_large_embedding(seed, model):
    """It needs 20 of 24 pages. Younger texts give their pages, older ones end before it."""
    rng = random.Random(seed)
    engine = engine_for(model, PAGES)
    large = prompt_query(drawn(rng, 76), mean=True)
    assert num_steps(engine, large, (text, embedding), rng, 120)


def test_a_text_that_waits_for_a_place_does_not_hold_up_scores(model):
    """It lacks no pages: only a text must end for it."""
    engine, rng = engine_for(model, 200, max_running=1), random.Random(0)
    first, second = engine.submit(text(rng, 30)), engine.submit(text(rng, 30))
    engine.step()
    small = engine.submit(embedding(rng))
    engine.step()
    assert small.done() and not first.done() and not second.done()
