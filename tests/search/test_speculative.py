"""Speculation changes nothing but the rounds: `speculative` against `beam`, good heads and bad."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.request import PrefixKeys, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.evaluation.cases import Cases
from recserve.evaluation.slates import SlateOptions, Slates
from recserve.models.item_heads import Calibration, DraftPlan, load_self_draft, save_self_draft
from recserve.search.strategies import speculative
from recserve.search.strategies.speculative import NO_DRAFT, PlanPolicy, work
from recserve.search.strategy import Heads
from recserve.training.item_drafters.calibration import calibrate
from tests.support.draft_heads import NOTHING, make_head
from tests.support.grids import covering
from tests.support.recommenders import CATALOGUES, FORMS, draw_prefix, make

SMALL = EngineConfig(kv_bytes=16 * 2**20)


def cached(engine, request):
    """Returns what is cached with a request's prefix."""
    return engine.schedulers["recommender"].kv.prefixes.match(PrefixKeys(request.prefix.keys))[2]


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
        SlateQuery(
            prefix=draw_prefix(model, 1 + 2 * i, i),
            trie=trie,
            k=1 + i,
            beam_width=width,
            strategy="speculative",
            excluded=rng.integers(0, len(codes), i) if len(codes) > 20 else None,
        )
        for i, width in enumerate((1, 3, 10, 40))
    ]
    for request, drafted in zip(requests, engine.run_many(requests), strict=True):
        plain = engine.run(SlateQuery(**{**vars(request), "strategy": "beam"}))
        assert drafted.exact and drafted.rows.tolist() == plain.rows.tolist()
        np.testing.assert_allclose(drafted.scores, plain.scores, atol=2e-5)
        assert drafted.rounds <= plain.rounds + 2  # a floor that was too high, and what it hid


@pytest.mark.parametrize("drafts", [True, False])
def test_the_plan_follows_the_calibration_and_the_slate_does_not(drafts):
    """The work of a plan decides whether a draft is made; both ways give beam search's slate."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    head = make_head(model, "calibrated")
    if not drafts:
        head.calibration = Calibration({(10, 10): (NOTHING, DraftPlan(4.0, 90.0, 0.0, 1.0))})
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    requests = [
        SlateQuery(prefix=draw_prefix(model, 9, i), trie=trie, k=5, beam_width=5 + i)
        for i in range(4)
    ]
    plain = engine.run_many(requests)
    drafted = engine.run_many([replace(r, strategy="speculative") for r in requests])
    for one, two in zip(plain, drafted, strict=True):
        assert one.rows.tolist() == two.rows.tolist() and not one.timing.drafted
        assert two.timing.drafted == drafts
        if not drafts:
            assert two.rounds == one.rounds and two.timing.nodes == one.timing.nodes


def test_a_plan_is_chosen_by_its_nodes_and_rounds():
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    request = SlateQuery(prefix=draw_prefix(model, 9, 0), trie=trie, k=10, beam_width=50)
    head = make_head(model, "from-target")
    policy = PlanPolicy("speculative", head)

    def choose(*plans: DraftPlan) -> DraftPlan:
        head.calibration = Calibration({(50, 10): plans})
        return policy.plan(request)

    beam = DraftPlan(0.0, 120.0, 1.0, 0.0)
    narrow, wide = DraftPlan(1.0, 60.0, 0.8, 0.5), DraftPlan(4.0, 90.0, 0.0, 1.0)
    assert [work(plan) for plan in (beam, narrow, wide)] == [160.0, 96.0, 110.0]
    assert choose(beam, narrow, wide) == narrow
    assert choose(beam, wide) == wide
    assert choose(beam, DraftPlan(4.0, 110.0, 0.0, 1.0)) == NO_DRAFT
    assert choose(beam) == NO_DRAFT
    head.calibration = None
    assert policy.plan(request).margin > 0  # a head without a calibration always drafts


def test_a_cached_draft_is_used_where_the_plan_is_beam_search(drafts):
    """The first slate is beam search's own; what proved it is the draft of the second."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    head = make_head(model, "from-target")
    head.calibration = Calibration({(10, 10): (NOTHING,)})
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    request = SlateQuery(
        prefix=draw_prefix(model, 9, 0), trie=trie, k=5, beam_width=10, strategy="speculative"
    )
    first, second = engine.run(request), engine.run(request)
    assert not first.timing.drafted and second.timing.drafted and not drafts
    assert second.rounds == 1 < first.rounds and second.rows.tolist() == first.rows.tolist()


def test_calibration_finds_what_the_head_is_worth():
    """The measured shares hold when the plans are carried out, and a plan drafts nothing."""
    codes = torch.unique(torch.randint(0, 9, (900, 4), generator=torch.manual_seed(3)), dim=0)
    model, trie = make(codes, "items", "children")
    head = make_head(model, "from-target")
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(codes), 24 * 6)
    starts = np.arange(24) * 6
    cases = Cases(rows, starts, starts + 5, rows[starts + 5], np.arange(24))
    with torch.no_grad():
        head.calibration = calibrate(head, model, trie, codes.numpy(), cases)
    plans = head.calibration.plans[10, 10]
    assert plans[0].margin == 0 and plans[0].repairs >= 1
    assert all(a.margin < b.margin and a.proved <= b.proved + 0.05 for a, b in pairwise(plans))
    slates = Slates(model, trie, codes.numpy(), Heads(head))
    for plan in (plans[1], plans[-1]):
        drafted = speculative.SpeculativeStrategy(model, head, plan, caches=False)
        slates.engine.add_strategy("beam", drafted)
        answers = slates.answers(cases, np.arange(24), 10, SlateOptions(10))
        proved = np.mean([answer.rounds <= 1 for answer in answers])
        assert abs(proved - plan.proved) < 0.1


def test_a_wide_draft_needs_one_round():
    """With every prefix drafted the first forward proves the answer."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, "drawn"))), SMALL)
    engine._strategies["speculative"].policy.only = DraftPlan(50.0, 0.0, 0.0, 1.0)
    prefix = draw_prefix(model, 9, 0)
    drafted = engine.run(
        SlateQuery(prefix=prefix, trie=trie, k=10, beam_width=60, strategy="speculative")
    )
    plain = engine.run(SlateQuery(prefix=prefix, trie=trie, k=10, beam_width=60))
    assert plain.rounds > 1 and drafted.rounds == 1
    assert drafted.rows.tolist() == plain.rows.tolist()


@pytest.fixture
def drafts(monkeypatch):
    """Whom the head drafted for: prefixes, one list for each time."""
    asked = []
    likely = speculative.draft_paths

    def noted(search, head):
        asked.append([request.prefix.keys.tolist() for request in search.requests])
        return likely(search, head)

    monkeypatch.setattr(speculative, "draft_paths", noted)
    return asked


@pytest.mark.parametrize("kind", ["from-target", "adversarial"])
@pytest.mark.parametrize("margin", [0.0, 2.0])
def test_what_proved_an_answer_proves_it_again(drafts, margin, kind):
    """Asked again, alone or among others: no draft, one round, no node too many, beam's answer."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    head = make_head(model, kind)
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    strategy = engine._strategies["speculative"]
    strategy.policy.only = DraftPlan(margin, 0.0, 0.0, 1.0)
    requests = [
        SlateQuery(
            prefix=draw_prefix(model, 9, i), trie=trie, k=5, beam_width=10, strategy="speculative"
        )
        for i in range(3)
    ]
    first = [engine.run(request) for request in requests]
    made = len(drafts)
    assert made == (3 if margin else 0)
    strategy.policy.only = DraftPlan(2.0, 0.0, 0.0, 1.0)
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
    draft = cached(engine, requests[0]).draft
    assert draft.trimmed and len(draft.nodes) == third[0].timing.nodes


@pytest.mark.parametrize(
    "trims,kind,way",
    covering((True, False), ("from-target", "adversarial"), {"-".join(f): f for f in FORMS}),
)
def test_kept_drafts_and_new_ones_share_a_forward(way, kind, trims):
    """Some asked before, some not, one with a filter: every slate is beam search's, and what was
    kept is scored in one round, no node more than when asked alone.
    """
    model, trie = make(CATALOGUES["ordinary"], *way)
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, kind))), SMALL)
    engine._strategies["speculative"].policy.only = DraftPlan(2.0, 0.0, 0.0, 1.0)
    allowed = np.ones(trie.num_rows, dtype=bool)
    allowed[::2] = False
    requests = [
        SlateQuery(
            prefix=draw_prefix(model, 9, i),
            trie=trie,
            k=3 + i,
            beam_width=8 + i,
            strategy="speculative",
        )
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
    notes = [cached(engine, request).draft for request in requests]
    assert [note is not None for note in notes] == [True, True, True, False, True, True]


def test_a_kept_draft_is_not_used_for_another_question(drafts):
    """Another k, width, exclusion, filter or catalogue version, or a prefix that was forgotten."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, "from-target"))), SMALL)
    prefix = draw_prefix(model, 9, 0)
    asked = SlateQuery(
        prefix=prefix, trie=trie, k=5, beam_width=10, strategy="speculative", excluded=np.array([3])
    )
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
    engine.forget(PrefixKeys(prefix.keys))
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


def test_a_head_of_another_kind_is_refused_by_name(tmp_path):
    """Bundles of November 2026 and before may hold one."""
    (tmp_path / "config.json").write_text('{"head": "lattice", "hidden_size": 32}')
    with pytest.raises(ValueError, match="names the head 'lattice'.*recserve train drafter"):
        load_self_draft(tmp_path, make(CATALOGUES["ordinary"], "items", "children")[0])


def test_without_a_head_the_strategy_is_refused():
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model), SMALL)
    with pytest.raises(ValueError, match="choose one of"):
        engine.submit(
            SlateQuery(
                prefix=draw_prefix(model, 3, 0),
                trie=trie,
                k=3,
                beam_width=3,
                strategy="speculative",
            )
        )


def test_a_cached_prefix_holds_its_last_state_and_the_nodes_of_its_draft_alone():
    """Requests that share a step do not keep the step's tensors alive."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = build_engine(EngineModels(model, heads=Heads(make_head(model, "from-target"))), SMALL)
    asked = [
        SlateQuery(
            prefix=draw_prefix(model, n, n), trie=trie, k=5, beam_width=9, strategy="speculative"
        )
        for n in range(1, 9)
    ]
    engine.run_many(asked)
    for request in asked:
        entry = cached(engine, request)
        nodes = entry.draft.nodes
        assert entry.last_hidden.untyped_storage().nbytes() == 4 * model.config.decoder.hidden_size
        assert entry.placeholder_states is None
        assert nodes.untyped_storage().nbytes() == 8 * nodes.numel() > 0
