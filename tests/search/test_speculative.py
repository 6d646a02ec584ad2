"""Speculation changes nothing but the rounds: `speculative` against `beam`, good heads and bad."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.cost import Cost, measured
from recserve.core.request import RecommendRequest, RootKeys
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.items import measured_steps as measured_steps_module
from recserve.engine.runtime import costs as costs_module
from recserve.engine.runtime.costs import forward_cost
from recserve.models.drafters.calibration import Calibration, DraftPlan
from recserve.models.drafters.nezha import load_self_draft, save_self_draft
from recserve.search.heads import Heads
from recserve.search.plan_choice import MANY, RETRY, TRIALS, Group, PlanChoice
from recserve.search.step_costs import StepCosts, further_rounds
from recserve.search.strategies import SpeculativeStrategy, speculative
from recserve.training.evaluation.cases import Cases
from recserve.training.evaluation.slates import SlateOptions, Slates
from recserve.training.item_drafters.calibration import calibrate
from tests.support.draft_heads import CALIBRATION, NOTHING, make_head
from tests.support.grids import covering
from tests.support.recommenders import CATALOGUES, FORMS, draw_root, make
from tests.support.step_costs import DEAR, LINE, drafted_at, flat

SMALL = EngineConfig(kv_bytes=16 * 2**20)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "codes,form,kind",
    covering(
        CATALOGUES,
        FORMS,
        ("drawn", "from-target", "adversarial", "constant", "calibrated"),
        pairs=True,
    ),
)
def test_same_ids_order_and_scores_as_beam(codes, form, kind):
    model, trie = make(codes, *form)
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, kind))), SMALL)
    rng = np.random.default_rng(0)
    requests = [
        RecommendRequest(
            draw_root(model, 1 + 2 * i, i),
            trie,
            1 + i,
            width,
            "speculative",
            excluded=rng.integers(0, len(codes), i) if len(codes) > 20 else None,
        )
        for i, width in enumerate((1, 3, 10, 40))
    ]
    for request, drafted in zip(requests, engine.run_many(requests), strict=True):
        plain = engine.run(RecommendRequest(**{**vars(request), "strategy": "beam"}))
        assert drafted.exact and drafted.rows.tolist() == plain.rows.tolist()
        np.testing.assert_allclose(drafted.scores, plain.scores, atol=2e-5)
        assert drafted.rounds <= plain.rounds + 2  # a floor that was too high, and what it hid


@pytest.mark.parametrize("dear", DEAR)
def test_the_plan_follows_the_costs_and_the_answer_does_not(dear):
    """Where rounds are dear all is drafted; where nodes are, nothing, as in full beam search."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, "calibrated"))), SMALL)
    engine._strategies["speculative"].choice.costs = DEAR[dear]
    requests = [RecommendRequest(draw_root(model, 9, i), trie, 5, 5 + i) for i in range(4)]
    plain = engine.run_many(requests)
    drafted = engine.run_many([replace(r, strategy="speculative") for r in requests])
    for one, two in zip(plain, drafted, strict=True):
        assert one.rows.tolist() == two.rows.tolist() and not one.timing.drafted
        assert two.timing.drafted == (dear == "rounds")
        if dear == "rounds":
            assert two.rounds == 1 < one.rounds and two.timing.nodes > one.timing.nodes
        else:
            assert two.rounds == one.rounds and two.timing.nodes == one.timing.nodes


def test_expected_costs_by_hand():
    """A forward of n nodes is 1 ms + (n - 1) / 99; 3 ms around a round, 4 ms around a draft of any
    width."""
    costs = StepCosts(LINE, flat(3.0), flat(4.0), flat(3.5))
    line = lambda n: 1 + (n - 1) / 99  # noqa: E731
    # 30 nodes in 2 rounds, always.
    plain = DraftPlan(0.0, 30.0, 1.0, 0.0)
    assert costs.expected_ms(plain, 10, 1) == pytest.approx(2 * (line(15) + 3))
    assert costs.expected_ms(plain, 10, 4) == pytest.approx(2 * (line(60) + 3))
    # Half of the answers need one more round.
    half = DraftPlan(1.0, 40.0, 0.5, 0.5)
    assert costs.expected_ms(half, 10, 1) == pytest.approx(4 + line(40) + 0.5 * (line(1) + 3.5))
    # What was kept needs none.
    assert costs.expected_ms(half, 10, 1, kept=True) == pytest.approx(3.5 + line(40))
    # Of two requests one is missed in 3 of 4 cases, and both wait.
    assert costs.expected_ms(half, 10, 2) == pytest.approx(4 + line(80) + 0.75 * (line(2) + 3.5))


def test_rounds_of_a_group_are_those_of_its_slowest():
    """Against draws: each request's further rounds are geometric, the group waits for the most."""
    rng = np.random.default_rng(0)
    for proved, repairs in ((0.5, 1.0), (0.9, 0.15), (0.0, 1.3), (1.0, 0.0)):
        plan = DraftPlan(1.0, 40.0, repairs, proved)
        missed = 1 - proved
        for batch in (1, 4, 16):
            drawn = np.zeros((20_000, batch))
            if missed:
                more = rng.geometric(missed / repairs, drawn.shape)
                drawn = np.where(rng.random(drawn.shape) < missed, more, 0)
            assert further_rounds(plan, batch) == pytest.approx(drawn.max(1).mean(), abs=0.05)


@pytest.mark.parametrize("draft_ms,beam_ms", [(8.0, 10.0), (12.0, 10.0)])
def test_answers_correct_what_was_expected(draft_ms, beam_ms):
    """Both are tried; then the faster one is taken, and the other once in RETRY groups."""
    choice = PlanChoice(CALIBRATION)
    choice.costs = DEAR["rounds"]
    found = drafted_at(choice, Group(10, 10, 1), draft_ms, beam_ms, 4 * RETRY)
    assert found[: 2 * TRIALS] == [True] * TRIALS + [False] * TRIALS
    later = found[2 * TRIALS :]
    faster = draft_ms < beam_ms
    assert later.count(not faster) == 4 and later[:8] == [faster] * 8
    # The machine changes its mind, and the retries notice.
    again = drafted_at(choice, Group(10, 10, 1), 50.0 if faster else 2.0, beam_ms, 40 * RETRY)
    assert again[-RETRY // 2 :].count(faster) <= 1


@pytest.mark.parametrize("true_ratio", [0.9, 1.06])
def test_what_is_close_is_tried_more_often(true_ratio):
    """Four tries under noise of a fifth would often be wrong, and what lost is seldom tried again:
    of 200 machines nine in ten end with the faster way.
    """
    rng, right = np.random.default_rng(0), 0
    for _ in range(200):
        choice = PlanChoice(CALIBRATION)
        choice.costs = DEAR["rounds"]
        group = Group(10, 10, 1)
        for _ in range(2 * MANY + 20):
            drafted = choice.plan(group).margin > 0
            choice.took(group, drafted, (true_ratio if drafted else 1.0) * rng.uniform(8, 12))
        right += choice.pays(group) == (true_ratio < 1)
    assert right >= 180


def test_what_cannot_pay_is_not_tried_and_cells_learn_apart():
    wide = Calibration({(10, 10): (NOTHING, DraftPlan(4.0, 80.0, 0.0, 1.0))})
    hopeless, unmeasured = PlanChoice(wide), PlanChoice(CALIBRATION)
    hopeless.costs = DEAR["nodes"]
    for choice in (hopeless, unmeasured):
        assert not any(drafted_at(choice, Group(10, 10, 1), 1.0, 10.0, 3 * RETRY))
    choice = PlanChoice(CALIBRATION)
    choice.costs = DEAR["rounds"]
    assert not drafted_at(choice, Group(10, 10, 1), 20.0, 10.0, 20)[-1]
    assert drafted_at(choice, Group(10, 10, 8), 8.0, 10.0, 20)[-1]
    # Of a head that was not calibrated nothing is known; it does as it is told.
    assert all(drafted_at(PlanChoice(None), Group(10, 10, 1), 12.0, 10.0, 20))


def test_no_request_measures(monkeypatch):
    """Costs are learned by `prepare`; requests of any size only read them."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, "calibrated"))), SMALL)
    choice = engine._strategies["speculative"].choice
    assert choice.costs is None
    engine.prepare(trie)
    costs = choice.costs
    for cost in (costs.forward, costs.round, costs.drafted, costs.kept):
        assert len(cost.sizes) == len(cost.milliseconds) >= 1 and min(cost.milliseconds) >= 0
    assert costs.forward(0) == 0 < costs.forward(1)

    def refuse(*_: object) -> None:
        raise AssertionError("measured on a request's path")

    for module in (costs_module, measured_steps_module):
        monkeypatch.setattr(module, "measured", refuse)
    for count, width in ((1, 5), (9, 5), (3, 40)):
        requests = [
            RecommendRequest(draw_root(model, 9, i), trie, 5, width, "speculative")
            for i in range(count)
        ]
        assert all(answer.exact for answer in engine.run_many(requests))
    assert choice.costs is costs


def test_measured_costs_are_bounded():
    runs = []

    def slow(size: int) -> None:
        runs.append(size)
        began = time.thread_time()
        while time.thread_time() - began < 0.004 * size:
            pass

    found = measured(slow, (1, 4, 16, 64), CPU)
    assert max(runs) < 64 and found.sizes[-1] == max(runs)
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    assert forward_cost(model)(1) > 0
    known = Cost((1, 4, 16), (2.0, 5.0, 5.0))
    assert [known(n) for n in (1, 2, 4, 10, 40)] == pytest.approx([2.0, 3.0, 5.0, 5.0, 5.0])
    assert Cost((4,), (2.0,))(8) == 4.0


def test_calibration_finds_what_the_head_is_worth():
    """The measured shares hold when the plans are carried out, and a plan drafts nothing."""
    codes = torch.unique(torch.randint(0, 9, (900, 4), generator=torch.manual_seed(3)), dim=0)
    model, trie = make(codes, "items", "children")
    head = make_head(model, "from-target")
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(codes), 40 * 6)
    starts = np.arange(40) * 6
    cases = Cases(rows, starts, starts + 5, rows[starts + 5], np.arange(40))
    with torch.no_grad():
        head.calibration = calibrate(head, model, trie, codes.numpy(), cases)
    plans = head.calibration.plans[10, 10]
    assert plans[0].margin == 0 and plans[0].repairs >= 1
    assert all(a.margin < b.margin and a.proved <= b.proved + 0.05 for a, b in pairwise(plans))
    slates = Slates(model, trie, codes.numpy(), Heads(head))
    for plan in (plans[1], plans[-1]):
        slates.engine.offer("beam", SpeculativeStrategy(model, head, plan, keeps=False))
        answers = slates.answers(cases, np.arange(40), 10, SlateOptions(10))
        proved = np.mean([answer.rounds <= 1 for answer in answers])
        assert abs(proved - plan.proved) < 0.1


def test_a_wide_draft_needs_one_round():
    """With every prefix drafted the first forward proves the answer."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, "drawn"))), SMALL)
    engine._strategies["speculative"].only = DraftPlan(50.0, 0.0, 0.0, 1.0)
    root = draw_root(model, 9, 0)
    drafted = engine.run(RecommendRequest(root, trie, 10, 60, "speculative"))
    plain = engine.run(RecommendRequest(root, trie, 10, 60))
    assert plain.rounds > 1 and drafted.rounds == 1
    assert drafted.rows.tolist() == plain.rows.tolist()


@pytest.fixture
def drafts(monkeypatch):
    """Whom the head drafted for: roots, one list for each time."""
    asked = []
    likely = speculative.likely_prefixes

    def noted(beams, *rest):
        asked.append([request.root.keys.tolist() for request in beams.requests])
        return likely(beams, *rest)

    monkeypatch.setattr(speculative, "likely_prefixes", noted)
    return asked


@pytest.mark.parametrize("kind", ["from-target", "adversarial"])
@pytest.mark.parametrize("margin", [0.0, 2.0])
def test_what_proved_an_answer_proves_it_again(drafts, margin, kind):
    """Asked again, alone or among others: no draft, one round, no node too many, beam's answer."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    head = make_head(model, kind)
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    strategy = engine._strategies["speculative"]
    strategy.only = DraftPlan(margin, 0.0, 0.0, 1.0)
    requests = [
        RecommendRequest(draw_root(model, 9, i), trie, 5, 10, "speculative") for i in range(3)
    ]
    first = [engine.run(request) for request in requests]
    made = len(drafts)
    assert made == (3 if margin else 0)
    strategy.only = DraftPlan(2.0, 0.0, 0.0, 1.0)
    second, third = ([engine.run(request) for request in requests] for _ in range(2))
    together = engine.run_many(requests)
    assert len(drafts) == made
    for request, *slates in zip(requests, first, second, third, together, strict=True):
        plain = engine.run(replace(request, strategy="beam"))
        for slate in slates:
            assert slate.exact and slate.rows.tolist() == plain.rows.tolist()
            np.testing.assert_allclose(slate.scores, plain.scores, atol=2e-5)
        assert all(slate.rounds == 1 for slate in slates[1:])
        nodes = [slate.timing.nodes for slate in slates]
        assert nodes[0] == nodes[1] >= nodes[2] == nodes[3] and nodes[2] <= plain.timing.nodes
    draft = engine.schedulers["recommender"].cache.match(requests[0].root.keys).notes.draft
    assert draft.trimmed and len(draft.nodes) == third[0].timing.nodes


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("kind", ["from-target", "adversarial"])
@pytest.mark.parametrize("form,normalization", FORMS)
def test_kept_drafts_and_new_ones_share_a_forward(form, normalization, kind, trims):
    """Some asked before, some not, one with a filter: every slate is beam search's, and what was
    kept is scored in one round, no node more than when asked alone.
    """
    model, trie = make(CATALOGUES["ordinary"], form, normalization)
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, kind))), SMALL)
    engine._strategies["speculative"].only = DraftPlan(2.0, 0.0, 0.0, 1.0)
    allowed = np.ones(trie.num_rows, dtype=bool)
    allowed[::2] = False
    requests = [
        RecommendRequest(draw_root(model, 9, i), trie, 3 + i, 8 + i, "speculative")
        for i in range(6)
    ]
    requests[3] = replace(requests[3], allowed=AllowedItems.of(allowed))
    for _ in range(3 if trims else 1):
        before = [engine.run(request) for request in requests[:3]]
    mixed = engine.run_many(requests)
    again = engine.run_many(requests)
    for request, *slates in zip(requests, mixed, again, strict=True):
        plain = engine.run(replace(request, strategy="beam"))
        for slate in slates:
            assert slate.exact and slate.rows.tolist() == plain.rows.tolist()
            np.testing.assert_allclose(slate.scores, plain.scores, atol=2e-5)
    assert [slate.rounds for slate in mixed[:3]] == [1, 1, 1]
    if trims:
        nodes = [slate.timing.nodes for slate in mixed[:3]]
        assert nodes == [slate.timing.nodes for slate in before]
    notes = [
        engine.schedulers["recommender"].cache.match(request.root.keys).notes
        for request in requests
    ]
    assert [note.draft is not None for note in notes] == [True, True, True, False, True, True]


def test_a_kept_draft_is_not_used_for_another_question(drafts):
    """Another k, width, exclusion, filter or catalogue version, or a root that was forgotten."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, "from-target"))), SMALL)
    root = draw_root(model, 9, 0)
    asked = RecommendRequest(root, trie, 5, 10, "speculative", excluded=np.array([3]))
    engine.run(asked)
    allowed = np.ones(trie.num_rows, dtype=bool)
    allowed[: trie.num_rows // 2] = False
    others = [
        replace(asked, k=6),
        replace(asked, beam_width=12),
        replace(asked, excluded=np.array([4])),
        replace(asked, excluded=None),
        replace(asked, allowed=AllowedItems.of(allowed)),
        replace(asked, trie=replace(trie)),
    ]
    for count, other in enumerate(others, start=2):
        slate = engine.run(other)
        assert len(drafts) == count
        plain = engine.run(replace(other, strategy="beam"))
        assert slate.rows.tolist() == plain.rows.tolist()
        if other.allowed is None:
            engine.run(replace(other))
            assert len(drafts) == count
    engine.forget(RootKeys(root.keys))
    engine.run(others[-1])
    assert len(drafts) == len(others) + 2


def test_a_saved_head_drafts_the_same(tmp_path):
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    head = make_head(model, "calibrated")
    save_self_draft(head, tmp_path)
    loaded = load_self_draft(tmp_path, model)
    assert loaded.calibration == head.calibration
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    other, _ = make(CATALOGUES["deep"], "items", "children")
    with pytest.raises(ValueError, match="was made for"):
        load_self_draft(tmp_path, other)


def test_without_a_head_the_strategy_is_refused():
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model), SMALL)
    with pytest.raises(ValueError, match="choose one of"):
        engine.submit(RecommendRequest(draw_root(model, 3, 0), trie, 3, 3, "speculative"))
