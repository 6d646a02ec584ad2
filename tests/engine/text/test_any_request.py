"""Every request is either refused when it is submitted, or it runs to its end."""

import numpy as np
import pytest

from recserve.drafters.draft_model.specinfer import specinfer
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.none import NoDrafter
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifiers.registry import verifiers
from tests.support.grids import chosen
from tests.support.text_engines import MAKERS, assert_no_leak, engine_for, shared_model
from tests.support.text_plain import VOCABULARY, drawn_model

POSITIONS = 64  # of the model
MORE_MAKERS = {
    "none": lambda m: NoDrafter(),
    "two_models": lambda m: specinfer([m, drawn_model(3)], VOCABULARY, (2, 1)),
    "all_chosen": lambda m: MergedDrafter([NgramDrafter(min_match=1), MAKERS["suffix"](m)]),
    "model_and_ngram": lambda m: MergedDrafter(
        [MAKERS["draft_model"](m), NgramDrafter(min_match=1)]
    ),
}
EVERY_MAKER = MAKERS | MORE_MAKERS
SOME = ("model_and_ngram",)


def drawn_request(random, drafter: str, rule: str):
    """Returns a request of which each part may be usual, extreme or, rarely, wrong."""

    def one_of(usual, *others, share=0.4):
        return others[random.integers(len(others))] if random.random() < share else usual

    def tokens(most, least=0):
        low, high = one_of((0, VOCABULARY), (-2, VOCABULARY), (0, VOCABULARY + 2), share=0.03)
        return [int(t) for t in random.integers(low, high, random.integers(least, most + 1))]

    everything = tuple(range(VOCABULARY))
    size = one_of(9, 1, 3, 30, POSITIONS - 1, *[POSITIONS] * (random.random() < 0.1))
    # Lookup drafters find what repeats.
    prompt = np.resize(tokens(one_of(size, 3), least=1), size)
    temperature = one_of(1.0, 1e-40, 1e-20, 1e-6, 0.7, 2.0, 100.0)
    params = SamplingParams(
        temperature=0.0 if rule == "greedy" else one_of(temperature, 0.0),
        top_k=one_of(0, 1, 5, 2**31),
        top_p=one_of(1.0, 0.0, 1e-30, 0.8),
        min_p=one_of(0.0, 0.1, 1.0),
        repetition_penalty=one_of(1.0, 0.01, 1.3, 100.0),
        presence_penalty=one_of(0.0, -100.0, 1.0, 100.0),
        frequency_penalty=one_of(0.0, -100.0, 0.5, 100.0),
        logit_bias=one_of(
            {},
            {token: float(random.normal()) for token in tokens(5)},
            {token: one_of(1e9, -1e9, share=0.5) for token in tokens(5)},
            dict.fromkeys(everything, -1e9),
        ),
        bad_words=one_of(
            (),
            tuple(tuple(tokens(3, least=1)) for _ in range(4)),
            tuple((token,) for token in everything[random.integers(3) :]),
        ),
        seed=one_of(0, -(2**63), 2**63 - 1),
        max_tokens=one_of(25, 1, 2, 12, POSITIONS, 10**9),
        min_tokens=one_of(0, 1, 2, 30, share=0.2),
        stop_token_ids=one_of((), tuple(tokens(9)), everything),
        logprobs=one_of(None, 0, 3, VOCABULARY, 10**6),
    )
    trees = ((0,), (0, 0), (1,)), ((0, 0),), ((VOCABULARY,),), ((),)
    drafting = one_of(None, 0, 1, 5, 256), one_of(None, *trees, share=0.1)
    return TextQuery(prompt, params, Speculation(drafter, rule, *drafting))


@pytest.mark.parametrize("drafter", chosen(list(EVERY_MAKER), *SOME))
def test_a_request_is_refused_at_once_or_runs_to_its_end(drafter):
    random = np.random.default_rng(list(EVERY_MAKER).index(drafter))
    model, refused, pending = shared_model(), 0, []
    engine = engine_for(model, 400, drafters={drafter: EVERY_MAKER[drafter](model)})
    for _ in range(3 if drafter in SOME else 6):
        for rule in verifiers():
            try:
                request = drawn_request(random, drafter, rule)
                pending.append((request, engine.submit(request)))
            except ValueError:
                refused += 1
        while engine.step():
            pass
    for request, future in pending:
        assert future.exception(0) is None, request
    assert pending and refused
    assert_no_leak(engine)
