"""Scores of many texts: equal to a plain loop, and computed in steps that others can pass."""

import random

import numpy as np
import pytest
import torch

from recserve.core.errors import DeadlineExceeded
from recserve.core.request import Prefix, PromptQuery, Scores, TextScoreQuery
from recserve.engine import round_scheduler as scheduler_module
from recserve.engine import scheduler as runtime_scheduler
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.inputs import NodeInputs
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.text_plain import VOCABULARY, drawn_model, last_logits


def request_of(root: list[int], texts: list[list[int]], labels: tuple[int, ...], group: int = 0):
    keys = np.array(root, np.int64)
    return TextScoreQuery(
        Prefix(NodeInputs(torch.from_numpy(keys)), keys),
        np.array([token for text in texts for token in text], np.int64),
        np.cumsum([0, *map(len, texts)]),
        labels,
        group=group,
    )


def prompt_of(tokens: list[int], num_top: int | None = None):
    empty = np.zeros(0, np.int64)
    root = Prefix(NodeInputs(torch.from_numpy(empty)), empty)
    return PromptQuery(root, np.array(tokens, np.int64), num_top, mean=True)


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
    assert first.timing.prefix_cached >= 20 and again.timing.prefix_computed == 0
    np.testing.assert_allclose(first.values, again.values, atol=2e-5)
    scheduler = engine.schedulers["text"]
    assert engine.stats().pages_total == scheduler.kv.allocator.num_pages
    scheduler.kv.prefixes.evict(scheduler.kv.allocator.num_pages)
    assert scheduler.kv.allocator.num_free == scheduler.kv.allocator.num_pages


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


STEP = 16


@pytest.fixture
def stepped() -> tuple[Engine, list[int]]:
    """An engine whose scoring steps have STEP tokens at most, and the tokens of each step."""
    engine = build_engine(EngineModels(text=drawn_model()), EngineConfig(page_size=4))
    scheduler = engine.schedulers["text_scores"]
    scheduler.step_tokens, scheduler.admitted_tokens = STEP, 8 * STEP
    sizes: list[int] = []
    step = scheduler.step

    def watched(cancelled):
        forward = scheduler.runner.forward

        def counted(pieces, *args):
            sizes.append(sum(len(piece.inputs) for piece in pieces))
            return forward(pieces, *args)

        scheduler.runner.forward = counted  # the text scheduler has the same runner
        try:
            return step(cancelled)
        finally:
            scheduler.runner.forward = forward

    scheduler.step = watched
    return engine, sizes


def assert_all_pages_free(engine: Engine) -> None:
    scheduler = engine.schedulers["text_scores"]
    assert scheduler.num_running == 0
    scheduler.kv.prefixes.evict(scheduler.kv.allocator.num_pages)
    assert scheduler.kv.allocator.num_free == scheduler.kv.allocator.num_pages


def test_steps_are_bounded_and_scores_stay(stepped):
    """Long and short texts, prompts with log-probabilities, more than are admitted at once."""
    engine, sizes = stepped
    rng = random.Random(3)
    requests = [request_of(drawn(rng, 5, 9), [drawn(rng, 1, 30) for _ in range(9)], (1, 2, 3))]
    requests += [prompt_of(drawn(rng, 1, 60), num_top) for num_top in (None, 3, None, 2)]
    requests += [request_of([], [drawn(rng, 1, 4)], (4,)), prompt_of(drawn(rng, 60, 61))]
    found = engine.run_many(requests)
    whole = build_engine(EngineModels(text=drawn_model()))
    whole.schedulers["text_scores"].step_tokens = None
    for result, expected in zip(found, whole.run_many(requests), strict=True):
        if isinstance(result, Scores):
            np.testing.assert_allclose(result.values, expected.values, atol=2e-5)
            continue
        np.testing.assert_allclose(result.mean, expected.mean, atol=2e-5)
        np.testing.assert_allclose(result.chosen, expected.chosen, atol=2e-5)
        assert result.ranks.tolist() == expected.ranks.tolist()
    assert max(sizes) == STEP and len(sizes) > 10
    assert_all_pages_free(engine)


def test_others_are_served_between_two_steps_of_a_large_request(stepped):
    engine, _ = stepped
    large = engine.submit(request_of([1, 2], [[3, 4, 5, 6]] * 64, (1, 2)))
    engine.step()
    text = engine.submit(TextQuery(np.array([1, 2, 3]), SamplingParams(max_tokens=4)))
    for _ in range(6):
        engine.step()
    assert text.done() and not large.done()
    while engine.step():
        pass
    assert large.result().values.shape == (64, 2)


def test_later_groups_of_a_body_give_way_to_other_bodies(stepped, monkeypatch):
    engine, _ = stepped
    monkeypatch.setattr(runtime_scheduler, "GROUP_DELAY_S", 60.0)
    texts = [[3, 4, 5, 6]] * 32
    groups = [engine.submit(request_of([1, 2], texts, (1, 2), group)) for group in range(3)]
    engine.step()
    other = engine.submit(request_of([7], [[8]], (1, 2)))
    while not other.done():
        assert engine.step()
    assert [group.done() for group in groups] == [True, False, False]
    while engine.step():
        pass
    assert all(group.done() for group in groups)


def test_a_late_request_leaves_between_two_steps(stepped, monkeypatch):
    engine, sizes = stepped
    late = engine.submit(request_of([1, 2], [[3, 4, 5, 6]] * 64, (1, 2)))
    for _ in range(4):
        engine.step()
    computed = len(sizes)
    assert computed == 4 and not late.done()
    monkeypatch.setattr(scheduler_module, "has_expired", lambda request: True)
    assert not engine.step()
    assert isinstance(late.exception(0), DeadlineExceeded) and len(sizes) == computed
    assert_all_pages_free(engine)


def test_a_cancelled_request_leaves_between_two_steps(stepped):
    engine, sizes = stepped
    cancelled = engine.submit(request_of([1, 2], [[3, 4, 5, 6]] * 64, (1, 2)))
    for _ in range(4):
        engine.step()
    computed = len(sizes)
    assert cancelled.cancel() and not engine.step() and len(sizes) == computed == 4
    assert_all_pages_free(engine)


def test_a_failing_step_of_several_costs_only_its_own_request(stepped):
    engine, _ = stepped
    runner = engine.schedulers["text_scores"].runner
    forward = runner.forward

    def failing(pieces, *args):
        if any(39 in piece.inputs.tokens.tolist() for piece in pieces):
            raise RuntimeError("no such row")
        return forward(pieces, *args)

    bad = request_of([1, 2], [[3, 4]] * 20 + [[39]], (1, 2))
    good = request_of([1, 2], [[3, 4]] * 20, (1, 2))
    expected = build_engine(EngineModels(text=drawn_model())).run(good)
    runner.forward = failing
    futures = [engine.submit(one) for one in (bad, good)]
    while engine.step():
        pass
    assert "no such row" in str(futures[0].exception())
    np.testing.assert_allclose(futures[1].result().values, expected.values, atol=2e-5)
    runner.forward = forward
    assert_all_pages_free(engine)
