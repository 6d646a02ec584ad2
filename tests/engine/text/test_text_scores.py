"""Labels after many texts in one forward: equal to a plain loop of full forwards."""

import random

import numpy as np
import pytest
import torch

from recserve.core.request import Root, TextScoreQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.inputs import NodeInputs
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.text_plain import VOCABULARY, drawn_model, last_logits


def request_of(root: list[int], texts: list[list[int]], labels: tuple[int, ...]):
    keys = np.array(root, np.int64)
    return TextScoreQuery(
        Root(NodeInputs(torch.from_numpy(keys)), keys),
        np.array([token for text in texts for token in text], np.int64),
        np.cumsum([0, *map(len, texts)]),
        labels,
    )


def drawn(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randrange(low, high))]


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_to_a_plain_loop(seed):
    """Three requests in the same step, other labels and shapes each, one without a root."""
    model, rng = drawn_model(seed), random.Random(seed)
    engine = build_engine(EngineModels(text=model))
    requests, expected = [], []
    for root, num_texts in ((drawn(rng, 9, 30), 7), ([], 3), (drawn(rng, 1, 5), 1)):
        texts = [drawn(rng, 1, 8) for _ in range(num_texts)]
        labels = tuple(rng.sample(range(VOCABULARY), 3))
        requests.append(request_of(root, texts, labels))
        rows = [last_logits(model, root + text).log_softmax(-1) for text in texts]
        expected.append(torch.stack(rows)[:, list(labels)].numpy())
    for answer, values in zip(engine.run_many(requests), expected, strict=True):
        np.testing.assert_allclose(answer.values, values, atol=2e-5)
        assert answer.timing.forwards == 1


def test_pages_and_prefixes_are_shared_with_the_texts_of_the_model():
    model, rng = drawn_model(), random.Random(5)
    engine = build_engine(EngineModels(text=model), EngineConfig(page_size=4))
    prompt = drawn(rng, 24, 25)
    engine.run(TextQuery(np.array(prompt), SamplingParams(temperature=0, max_tokens=4)))
    request = request_of(prompt, [[1, 2], [3]], (4, 5))
    first, again = engine.run(request), engine.run(request)
    assert first.timing.root_cached >= 20 and again.timing.root_computed == 0
    np.testing.assert_allclose(first.values, again.values, atol=2e-5)
    scheduler = engine.schedulers["text"]
    assert engine.stats().pages_total == scheduler.allocator.num_pages
    scheduler.cache.evict(scheduler.allocator.num_pages)
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages


def test_texts_and_scores_at_the_same_time_differ_in_nothing():
    model, rng = drawn_model(1), random.Random(9)
    requests = []
    for number in range(40):
        if number % 2:
            requests.append(request_of(drawn(rng, 2, 20), [drawn(rng, 1, 6)] * 2, (1, 2)))
        else:
            params = SamplingParams(seed=number, max_tokens=8)
            requests.append(TextQuery(np.array(drawn(rng, 2, 20)), params))
    together = build_engine(EngineModels(text=model), EngineConfig(page_size=4)).run_many(requests)
    for request, found in zip(requests, together, strict=True):
        alone = build_engine(EngineModels(text=model)).run(request)
        if isinstance(request, TextQuery):
            assert found.tokens.tolist() == alone.tokens.tolist()
        else:
            np.testing.assert_allclose(found.values, alone.values, atol=2e-5)
