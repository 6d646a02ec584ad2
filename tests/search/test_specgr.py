"""`specgr` against plain loops: what is proposed, accepted, filled up, and when it ends."""

import math

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap
from recserve.core.request import LikelihoodQuery, PrefixKeys, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.search.strategies import specgr
from recserve.search.strategy import Heads
from tests.support.dense_worlds import ORDINARY, World
from tests.support.grids import chosen
from tests.support.listed_groups import ListedGroups
from tests.support.recommenders import draw_prefix
from tests.support.slates import plain_first_k

ITEMS = len(ORDINARY)
SMALL = EngineConfig(kv_bytes=4 * 2**20)


@pytest.fixture(scope="module", params=chosen(("items", "codes"), "items"))
def world(request):
    return World(request.param)


def ask(world, seed, k=10, width=12, strategy="specgr", **fields):
    prefix = draw_prefix(world.model, 1 + seed % 9, seed)
    return SlateQuery(
        prefix=prefix,
        trie=world.trie,
        k=k,
        beam_width=width,
        strategy=strategy,
        index=world.index,
        **fields,
    )


def drawn_fields(seed):
    draw = np.random.default_rng(seed)
    offsets = np.cumsum([0, *draw.integers(0, 3, ITEMS)])
    listed = ListedGroups(offsets, draw.integers(0, 9, offsets[-1]))
    return {
        "allowed": AllowedItems.of(draw.random(ITEMS) < 0.4) if seed % 3 else None,
        "excluded": draw.integers(0, ITEMS, seed * 2) if seed % 2 else None,
        "caps": (Cap(listed, 2),) if seed % 4 == 3 else (),
    }


def likelihoods(world, request):
    """[I] of every item, by the strategy of that name."""
    every = LikelihoodQuery(request.prefix, world.trie, np.arange(ITEMS))
    return world.engine.run(every).values[:, 0]


def open_rows(request):
    """Items that a request may be answered with, one after another."""
    excluded = set() if request.excluded is None else set(request.excluded.tolist())
    allowed = np.ones(ITEMS, dtype=bool) if request.allowed is None else request.allowed.mask()
    return [row for row in range(ITEMS) if allowed[row] and row not in excluded]


@pytest.fixture
def drafts(monkeypatch):
    """What was proposed: (request number or None, beam nodes, rows), in order."""
    seen = []
    freely, below = specgr.draft_freely, specgr.draft_under_beams

    def free(search, *rest):
        items = freely(search, *rest)
        seen.append((None, None, items))
        return items

    def under(search, retriever, lacking, *rest):
        items, beams = below(search, retriever, lacking, *rest), search.beams
        seen.append(
            (
                list(lacking),
                [n[a].tolist() for n, a in zip(beams.nodes, beams.alive(), strict=True)],
                items,
            )
        )
        return items

    monkeypatch.setattr(specgr, "draft_freely", free)
    monkeypatch.setattr(specgr, "draft_under_beams", under)
    return seen


@pytest.mark.parametrize("lift", chosen((1e-9, 1.0, 3.0, 8.0, 1e9), "1e-09", "3.0", "1000000000.0"))
def test_slates_equal_a_plain_loop_over_what_was_proposed(world, lift, drafts, monkeypatch):
    monkeypatch.setattr(specgr, "MIN_LIFT", lift)
    guided_drafts = 0
    for seed in range(12):
        request = ask(world, seed, 3 + seed % 9, 12, **drawn_fields(seed))
        drafts.clear()
        slate = world.engine.run(request)
        scores = likelihoods(world, request)
        legal = set(open_rows(request))
        order = []
        for place, (_, nodes, items) in enumerate(drafts):
            rows = items.rows.tolist()
            assert set(rows) <= legal and len(set(rows)) == len(rows)
            if nodes is None:
                plain = ask(world, seed, 12, 12, "dense", **drawn_fields(seed) | {"caps": ()})
                assert rows == world.engine.run(plain).rows.tolist()
            else:
                guided_drafts += 1
                above = world.trie.nodes_of_items(torch.arange(ITEMS)).tolist()
                proposed = {r for _, _, before in drafts[:place] for r in before.rows.tolist()}
                below = {r for r in legal - proposed if set(above[r]) & set(nodes[0])}
                assert set(rows) <= below and len(rows) == min(len(below), 12)
                assert len(plain_first_k(order, request.caps, request.k)) < request.k
                rows.sort(key=lambda row: (-scores[row], row))
            order += [row for row in rows if scores[row] >= math.log(lift / ITEMS)]
        if len(plain_first_k(order, request.caps, request.k)) < request.k:
            beam = ask(world, seed, 12, 12, "beam", **drawn_fields(seed) | {"caps": ()})
            order += [r for r in world.engine.run(beam).rows.tolist() if r not in order]
        expected = plain_first_k(order, request.caps, request.k)
        assert slate.rows.tolist() == expected and not slate.exact
        np.testing.assert_allclose(slate.scores, scores[slate.rows], atol=2e-5)
    assert (guided_drafts > 0) == (lift > 1e-9)


def test_below_the_beams_are_the_nearest_items(world, monkeypatch):
    """What a guided draft leaves out is farther from the user's vectors than what it holds."""
    monkeypatch.setattr(specgr, "MIN_LIFT", 1e9)
    below, compared = specgr.draft_under_beams, 0

    def under(search, retriever, lacking, judged):
        nonlocal compared
        items = below(search, retriever, lacking, judged)
        open_ = specgr._open_below(search, 0, judged[0])
        if open_.sum() > (size := search.widths[0]):
            request = ask(world, 5, size, size, "dense", allowed=AllowedItems.of(open_))
            found = build_engine(EngineModels(world.model, heads=world.engine_heads), SMALL).run(
                request
            )
            assert set(items.rows.tolist()) == set(found.rows.tolist())
            compared += 1
        return items

    world.engine_heads = Heads(retriever=world.retriever)
    monkeypatch.setattr(specgr, "draft_under_beams", under)
    world.engine.run(ask(world, 5, 4, 4))
    assert compared


def test_company_does_not_change_a_slate(world, monkeypatch):
    monkeypatch.setattr(specgr, "MIN_LIFT", 4.0)
    requests = [ask(world, seed, 2 + seed, 12, **drawn_fields(seed)) for seed in range(10)]
    others = [ask(world, 90, 5, 8, "beam"), ask(world, 91, 5, 8, "dense")]
    together = world.engine.run_many([*requests, *others])
    assert len({slate.rounds for slate in together[:10]}) > 1
    for request, slate in zip(requests, together, strict=False):
        alone = build_engine(
            EngineModels(world.model, heads=Heads(retriever=world.retriever)), SMALL
        )
        again = alone.run(request)
        assert again.rows.tolist() == slate.rows.tolist() and again.rounds == slate.rounds
        np.testing.assert_allclose(again.scores, slate.scores, atol=2e-5)


def test_one_forward_is_enough_where_k_are_accepted(world, monkeypatch):
    monkeypatch.setattr(specgr, "MIN_LIFT", 1e-9)
    slate = world.engine.run(ask(world, 3, 5))
    assert slate.rounds == slate.timing.forwards == 1 and len(slate.rows) == 5


def test_every_valid_item_comes_where_k_is_larger(world):
    allowed = np.zeros(ITEMS, dtype=bool)
    allowed[[3, 40, 77]] = True
    fields = {"allowed": AllowedItems.of(allowed), "excluded": np.array([40, 40])}
    slate = world.engine.run(ask(world, 4, 50, 50, **fields))
    assert sorted(slate.rows.tolist()) == [3, 77]
    nobody = AllowedItems.of(np.zeros(ITEMS, dtype=bool))
    nothing = world.engine.run(ask(world, 4, 5, 5, allowed=nobody))
    assert nothing.rows.size == 0


def test_no_index_fails_alone(world):
    bare = SlateQuery(
        prefix=draw_prefix(world.model, 3, 1), trie=world.trie, k=5, beam_width=5, strategy="specgr"
    )
    right = ask(world, 2, 5)
    for request in (bare, right):  # neither prefix is cached, so that they start together
        world.engine.forget(PrefixKeys(request.prefix.keys))
    futures = [world.engine.submit(r) for r in (right, bare)]
    while world.engine.step():
        pass
    assert len(futures[0].result().rows) == 5
    with pytest.raises(ValueError, match="strategy 'specgr' needs the index"):
        futures[1].result()
