"""Every drafter in the engine: the same tokens as without, few pages, cancels, nothing left behind.

In float32; logits of a tree differ from plain ones in the last bits, and the drawn models have no
ties that close.
"""

from functools import cache

import numpy as np
import pytest

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.draft_model.specinfer import specinfer
from recserve.drafters.registry import build_drafter, drafter_classes
from recserve.models.loading import load_language_model
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import covering
from tests.support.paths import reference
from tests.support.text_engines import (
    MAKERS,
    PARAMETERS,
    assert_forgotten,
    assert_no_leak,
    engine_for,
    prompts,
)
from tests.support.text_plain import VOCABULARY, drawn_model


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


@pytest.fixture(scope="module")
def plain(model):
    """By parameters: what is written without drafts."""
    return cache(lambda name: engine_for(model).run_many(drafted("none", name)))


def requests(
    name: str, parameters: str, verifier: str = "sample", length: int = 24
) -> list[TextQuery]:
    """Eight texts, every other one with parameters of another kind."""
    fields = [PARAMETERS[parameters], PARAMETERS["warm"]]
    return [
        TextQuery(
            prompt,
            SamplingParams(**{"max_tokens": length, "seed": 100 + i} | fields[i % 2]),
            Speculation(name, verifier),
        )
        for i, prompt in enumerate(prompts(8))
    ]


def drafted(name: str, parameters: str) -> list[TextQuery]:
    """The requests of a comparison: penalties of drafted tokens show in long texts only."""
    return requests(name, parameters, length=24 if parameters == "everything" else 12)


def later(name: str) -> list:
    """Marks drafters whose own files compare their texts with the plain ones."""
    own = ("eagle", "mtp", "block", "block-dflash2", "specformer", "mask_tokens_linear")
    return [pytest.mark.slow] if name in own else []


@pytest.mark.parametrize(
    "name,parameters",
    [
        pytest.param(*one.values, id=one.id, marks=[*one.marks, *later(one.values[0])])
        for one in covering(tuple(MAKERS), ("greedy", "hot", "stops", "everything"))
    ],
)
def test_the_text_is_the_plain_text(name, parameters, model, plain):
    """Alone; eight together, with so few pages that some are preempted."""
    drafter = MAKERS[name](model)
    queries = drafted(name, parameters)
    expected_texts = plain(parameters)
    engine = engine_for(model, 14, {name: drafter})
    answers = engine.run_many(queries)
    for answer, expected in zip(answers, expected_texts, strict=True):
        assert answer.tokens.tolist() == expected.tokens.tolist()
        assert answer.finish_reason == expected.finish_reason
    assert_no_leak(engine)
    alone = engine_for(model, drafters={name: drafter}).run(queries[0])
    assert alone.tokens.tolist() == expected_texts[0].tokens.tolist()
    assert sum(answer.counts.num_drafts for answer in answers) > 0
    assert_forgotten(drafter)


@pytest.mark.parametrize(
    "name,verifier", covering(("draft_model", "specinfer"), ("rejection", "block", "multi_step"))
)
def test_drawn_drafts_are_judged_and_forgotten(name, verifier, model):
    """The draft model is the target, so nearly everything that it draws is kept."""
    drafter = ModelDrafter(model, VOCABULARY, (1, 1, 1), distinct=True)
    if name == "specinfer":
        drafter = specinfer([model, drawn_model(3)], VOCABULARY, (2, 1))
    engine = engine_for(model, drafters={name: drafter})
    answers = engine.run_many(requests(name, "hot", verifier))
    assert all(len(answer.tokens) == 24 for answer in answers)
    rate = sum(a.counts.num_accepted_tokens for a in answers) / sum(
        a.counts.num_drafts for a in answers
    )
    assert rate > 1.4
    assert_forgotten(drafter)


def test_cancelled_texts_leave_nothing(model):
    drafters = {name: make(model) for name, make in MAKERS.items()}
    engine = engine_for(model, 60, drafters)
    futures = [engine.submit(r) for name in MAKERS for r in requests(name, "warm", length=12)[:3]]
    for step in range(400):
        if step < len(futures) and step % 2:
            futures[step].cancel()
        if not engine.step():
            break
    assert all(future.done() for future in futures)
    assert_no_leak(engine)
    for drafter in drafters.values():
        assert_forgotten(drafter)


def test_known_text_of_a_trained_model():
    """stories260k with every drafter that needs no training, itself as the draft model."""
    folder = reference("stories260k")
    model = load_language_model(folder)
    trained = {name for name, cls in drafter_classes().items() if cls.reads_states}
    trained -= {"draft_model", "specinfer"}
    trained |= {"medusa", "mask_tokens", "mask_tokens_linear"}
    names = sorted(set(drafter_classes()) - trained - {"none"})
    names += ["suffix+draft_model", "ngram+lookahead"]
    weights = [folder]
    drafters = {name: build_drafter(name, model, weights) for name in names}
    engine = engine_for(model, 2000, drafters)
    prompt = np.array([1, 403, 407, 261, 378])  # Once upon a time
    params = SamplingParams(0.0, max_tokens=40)
    plain = engine.run(TextQuery(prompt, params))
    for name in names:
        answer = engine.run(TextQuery(prompt, params, Speculation(name)))
        assert answer.tokens.tolist() == plain.tokens.tolist()
        if "draft_model" in name or name == "specinfer":
            assert answer.counts.num_accepted_tokens / answer.counts.num_drafts > 3
