"""What is known of a drafter, and drafters that always guess wrong in the engine."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from recserve.core.draft_policy import (
    KNOWN_DRAFTS,
    PROBE_EVERY,
    PROBE_LENGTH,
    DraftPolicy,
    DraftRecord,
)
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.item_heads import Calibration, DraftPlan
from recserve.search.strategies.speculative import SpeculativeStrategy
from recserve.search.strategy import Heads
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.draft_heads import make_head
from tests.support.grids import covering
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.text_engines import undrafted
from tests.support.text_plain import TableDrafter, drawn_model


def test_a_drop_below_half_of_the_expectation_raises_the_alarm(caplog):
    watch = DraftRecord("ngram", break_even=0.05)
    with caplog.at_level(logging.INFO):
        for _ in range(2000):
            watch.add(2, 4, 2)
        assert not watch.alarm and watch.health().acceptance[:3] == (1.0, 1.0, 0.0)
        for _ in range(400):
            watch.add(0.4, 4, 0)
        assert watch.alarm and not watch.paused
        for _ in range(1000):
            watch.add(2, 4, 2)
    assert not watch.alarm
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2 and "alarm on" in lines[0] and "alarm off" in lines[1]


def test_a_pause_ends_once_probes_pay(caplog):
    watch = DraftRecord("ngram", break_even=0.05)
    with caplog.at_level(logging.INFO):
        for _ in range(KNOWN_DRAFTS - 1):
            watch.add(0, 3, 0)
        assert not watch.alarm and watch.allows()
        watch.add(0, 3, 0)
        assert watch.alarm and watch.paused and watch.health().recent == 0
        allowed = 0
        for _ in range(3 * PROBE_EVERY):
            if watch.allows():
                allowed += 1
                watch.add(0, 3, 0)
        assert allowed == 3 * PROBE_LENGTH and watch.paused
        for _ in range(PROBE_EVERY):
            if watch.allows() and watch.paused:
                watch.add(2, 3, 2)
    assert not watch.paused and not watch.alarm and watch.allows()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_calibration_is_the_expectation():
    watch = DraftRecord("speculative", break_even=0.0)
    for _ in range(KNOWN_DRAFTS):
        watch.add(1.0, 1, 1, calibrated=2.5)
    assert watch.expected == 2.5 and watch.alarm and not watch.paused


class Counting(TableDrafter):
    """How many drafts it made."""

    drafts = 0

    def propose(self, contexts, budgets):
        self.drafts += sum(budget.num_nodes > 0 for budget in budgets)
        return super().propose(contexts, budgets)


@pytest.mark.parametrize(
    "load_aware,verifier,temperature",
    [
        pytest.param(
            *one.values, id=one.id, marks=[*one.marks, *[pytest.mark.slow] * one.values[0]]
        )
        for one in covering((False, True), ("sample", "rejection"), (0.0, 0.9))
    ],
)
def test_a_drafter_that_is_always_wrong_is_paused(verifier, temperature, load_aware):
    """By its break-even, or by what its drafts cost. Drafts that shape a text are always made."""
    model = drawn_model(1)
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=7)
    prompts = [tuple(range(n, n + 6)) for n in range(8)]
    written = undrafted(model, [TextQuery(np.array(p), params) for p in prompts])
    texts = dict(zip(prompts, written, strict=True))
    drafter = Counting("wrong", texts)
    engine = build_engine(
        EngineModels(text=model, drafters={"wrong": drafter}),
        EngineConfig(page_size=4, kv_bytes=2**20, load_aware=load_aware),
    )
    requests = [TextQuery(np.array(p), params, Speculation("wrong", verifier)) for p in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        answer = engine.run(request)
        if verifier == "sample" or temperature == 0:
            assert answer.tokens.tolist() == texts[prompt]
    health = engine.stats().drafts["wrong"]
    if verifier == "rejection" and temperature:  # a draft influences these draws: it must stay
        assert drafter.drafts > 300
    elif not load_aware:  # else the cost of a step on this machine decides
        assert health.alarm and health.paused and health.recent < 0.05
        assert drafter.drafts < KNOWN_DRAFTS + 3 * PROBE_LENGTH


def slate_query(model, trie, seed):
    prefix = draw_prefix(model, 5, seed)
    return SlateQuery(prefix=prefix, trie=trie, k=10, beam_width=10, strategy="speculative")


def test_a_head_that_saves_no_round_is_paused_and_slates_stay_the_same():
    model, trie = make(CATALOGUES["ordinary"], "codes", "vocabulary")
    head = make_head(model, "adversarial")
    # The calibration promises what an adversarial head does not keep.
    nothing, promised = DraftPlan(0.0, 24.0, 2.0, 0.0), DraftPlan(1.0, 26.0, 0.0, 1.0)
    head.calibration = Calibration({(10, 10): (nothing, promised)})
    models = EngineModels(model, heads=Heads(head))
    engine = build_engine(models, EngineConfig(kv_bytes=16 * 2**20))
    drafts = []
    for start in range(0, KNOWN_DRAFTS + 16, 8):
        requests = [slate_query(model, trie, seed) for seed in range(start, start + 8)]
        answers = engine.run_many(requests)
        drafts += [answer.timing.drafted for answer in answers]
        exact = engine.run(replace(requests[0], strategy="beam"))
        assert answers[0].exact and answers[0].rows.tolist() == exact.rows.tolist()
        np.testing.assert_allclose(answers[0].scores, exact.scores, atol=2e-5)
    health = engine.stats().drafts["speculative"]
    assert health.alarm and health.paused and health.recent < 0 < health.expected
    assert all(drafts[:KNOWN_DRAFTS]) and not any(drafts[KNOWN_DRAFTS:])


def test_a_good_head_raises_no_alarm():
    model, trie = make(CATALOGUES["ordinary"], "codes", "vocabulary")
    head = make_head(model, "from-target")
    nothing, promised = DraftPlan(0.0, 24.0, 2.0, 0.0), DraftPlan(50.0, 30.0, 0.0, 1.0)
    head.calibration = Calibration({(10, 10): (nothing, promised)})
    engine = build_engine(EngineModels(model, heads=Heads(head)), EngineConfig(kv_bytes=2**24))
    requests = [slate_query(model, trie, seed) for seed in range(KNOWN_DRAFTS + 8)]
    for start in range(0, len(requests), 8):
        engine.run_many(requests[start : start + 8])
    health = engine.stats().drafts["speculative"]
    assert not health.alarm and not health.paused and health.acceptance == (1.0,)


def test_a_strategy_may_have_any_number_of_drafters():
    """Two strategies of one class have entries of their own."""
    model, _ = make(CATALOGUES["ordinary"], "codes", "vocabulary")
    head = make_head(model, "from-target")
    engine = build_engine(EngineModels(model, heads=Heads(head)), EngineConfig(kv_bytes=2**24))
    for number, drafters in enumerate(([], ["one"], ["one", "other"])):
        strategy = SpeculativeStrategy(model, head)
        strategy.policy = DraftPolicy(break_even=0.0, pauses=True)
        for drafter in drafters:
            strategy.policy.record(drafter)
        engine.add_strategy(f"plug-in {number}", strategy)
    engine.add_strategy("twin", SpeculativeStrategy(model, head))
    own = ["plug-in 1", "plug-in 2 one", "plug-in 2 other", "twin"]
    assert list(engine.stats().drafts) == ["speculative", *own]
