"""Caps on categories and prefixes: a plain greedy loop gives the same slates, in every strategy,
and searches go on until k items keep to the caps or none is left.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap, PrefixGroups, first_k, still_open
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.search.strategy import Heads
from tests.support.draft_heads import make_head
from tests.support.draft_heads import make_nezha_head as nezha_head
from tests.support.grids import chosen
from tests.support.listed_groups import ListedGroups
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.slates import groups_of, plain_first_k, plain_open

CONFIG = EngineConfig(kv_bytes=16 * 2**20)


def draw_cap(draw, items, most, groups, limit):
    """Each item in 0 to `most` groups."""
    lists = [draw.integers(0, groups, draw.integers(0, most + 1)) for _ in range(items)]
    offsets = np.cumsum([0, *map(len, lists)])
    flat = np.concatenate([np.zeros(0, np.int64), *lists]).astype(np.int64)
    return Cap(ListedGroups(offsets, flat), limit)


@pytest.mark.parametrize("seed", range(40))
def test_first_k_equals_a_greedy_loop(seed):
    draw = np.random.default_rng(seed)
    items = int(draw.integers(1, 200))
    caps = tuple(
        draw_cap(draw, items, min(most, 20), 20, int(draw.integers(1, 6)))
        for most in (1, 3)[: 1 + seed % 2]
    )
    rows = draw.permutation(items)[: draw.integers(0, items + 1)]
    for k in (1, 5, 300):
        places = first_k(rows, caps, k)
        assert rows[places].tolist() == plain_first_k(rows.tolist(), caps, k)
    assert first_k(rows, (), 7).tolist() == list(range(min(7, rows.size)))
    chosen = rows[first_k(rows, caps, 5)]
    allowed = draw.random(items) < 0.7
    left = still_open(chosen, caps, AllowedItems.of(allowed), items)
    expected = plain_open(chosen.tolist(), caps, np.flatnonzero(allowed).tolist())
    assert np.flatnonzero(left).tolist() == expected


class World:
    """The ordinary catalogue with both heads. packed: as a server on a CPU has them, in C."""

    def __init__(self, form="items", normalization="children", packed=False):
        self.codes = CATALOGUES["ordinary"]
        self.model, self.trie = make(self.codes, form, normalization)
        heads = Heads(make_head(self.model, "from-target"), nezha_head(self.model))
        for network in (self.model, heads.prefixes, heads.nezha) if packed else ():
            network.pack()
        self.engine = build_engine(EngineModels(self.model, heads=heads), CONFIG)

    def drawn(self, seed, **fields):
        """A request with caps by prefix, by list or both, half of them with filter or exclusions:
        few beams, so that what they hold is seldom enough.
        """
        draw, items = np.random.default_rng(seed), len(self.codes)
        by_prefix = Cap(PrefixGroups(self.trie, seed % 3), int(draw.integers(1, 3)))
        by_list = draw_cap(draw, items, 2, 16, 1)
        k = int(draw.integers(1, 14))
        asked = {
            "k": k,
            "beam_width": k + int(draw.integers(0, 3)),
            "excluded": draw.integers(0, items, 20) if seed % 2 else None,
            "allowed": AllowedItems.of(draw.random(items) < 0.6) if seed % 4 > 1 else None,
            "caps": [(by_prefix,), (by_list,), (by_prefix, by_list)][seed // 3 % 3],
        }
        prefix = draw_prefix(self.model, seed % 7, seed)
        return SlateQuery(prefix=prefix, trie=self.trie, **asked | fields)

    def legal(self, request):
        """Rows that the request may be answered with, caps aside."""
        every = np.ones(len(self.codes), bool)
        allowed = every if request.allowed is None else request.allowed.mask()
        allowed[[] if request.excluded is None else request.excluded] = False
        return np.flatnonzero(allowed).tolist()

    def plain(self, request):
        """Slate rows and scores by uncapped searches, each open to what may still be chosen, and
        how many it took.
        """
        chosen, scores, searches = [], {}, 0
        while True:
            left = plain_open(chosen, request.caps, self.legal(request))
            open_ = np.isin(np.arange(len(self.codes)), left)
            free = replace(
                request, k=request.width, caps=(), excluded=None, allowed=AllowedItems.of(open_)
            )
            found, searches = self.engine.run(free), searches + 1
            scores |= zip(found.rows.tolist(), found.scores.tolist(), strict=True)
            chosen = plain_first_k([*chosen, *found.rows.tolist()], request.caps, request.k)
            ended = not plain_open(chosen, request.caps, self.legal(request))
            if ended or len(chosen) == request.k or found.rows.size < request.width:
                chosen.sort(key=lambda row: (-scores[row], row))
                return chosen, [scores[row] for row in chosen], searches


WORLDS = {
    "children": ("items", "children"),
    "vocabulary": ("codes", "vocabulary"),
    "packed": ("items", "children", True),
}


@pytest.fixture(scope="module", params=chosen(WORLDS, "vocabulary", "packed"))
def world(request):
    return World(*request.param)


def test_groups_of_many_items_are_those_of_each_alone(world):
    """On which the plain loops here lean as the searches do."""
    rows = list(range(len(world.codes)))
    for seed in range(9):
        caps = world.drawn(seed).caps
        alone = [groups_of([row], caps)[row] for row in rows]
        assert list(groups_of(rows, caps).values()) == alone
        assert any(alone)


@pytest.mark.parametrize("strategy", ["beam", "nezha"])
def test_searches_go_on_among_what_the_caps_leave_open(world, strategy):
    """As uncapped searches would, one after another; k items wherever k keep to the caps."""
    most, short = 0, 0
    for seed in range(9):
        request = world.drawn(seed, strategy=strategy)
        rows, scores, searches = world.plain(request)
        slate = world.engine.run(request)
        assert slate.rows.tolist() == rows
        np.testing.assert_allclose(slate.scores, scores, rtol=1e-5, atol=1e-5)
        assert slate.exact == (strategy == "beam")
        assert plain_first_k(rows, request.caps, len(rows)) == rows
        assert set(rows) <= set(world.legal(request))
        if len(rows) < request.k:
            assert plain_open(rows, request.caps, world.legal(request)) == []
            short += 1
        if strategy == "nezha":
            assert slate.rounds == searches
        most = max(most, searches)
    assert most > 2 and short, "nothing was searched again, or nothing ran out"


def test_drafted_searches_are_those_of_beam(world):
    for seed in range(8):
        request = world.drawn(seed)
        beam = world.engine.run(request)
        other = world.engine.run(replace(request, strategy="speculative"))
        assert other.exact and other.rows.tolist() == beam.rows.tolist()
        np.testing.assert_allclose(other.scores, beam.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["beam", "speculative", "nezha"])
def test_company_does_not_matter(world, strategy):
    """Capped and free requests together and alone: the same answers, rounds and work."""
    requests = [world.drawn(seed, strategy=strategy) for seed in range(8)]
    requests += [replace(r, caps=()) for r in requests[::3]]
    alone = [world.engine.run(request) for request in requests]
    together = world.engine.run_many(requests)
    for request, one, other in zip(requests, alone, together, strict=True):
        assert other.rows.tolist() == one.rows.tolist()
        np.testing.assert_allclose(other.scores, one.scores, rtol=1e-5, atol=1e-5)
        if not request.caps and strategy == "beam":
            assert other.rounds <= world.trie.num_levels
    lane = world.engine.schedulers["recommender"]
    assert lane.kv.allocator.num_free + lane.kv.prefixes.num_pages == lane.kv.allocator.num_pages


def test_one_search_where_the_first_is_enough(world, monkeypatch):
    """Caps that bind nothing, and requests without any, take no round more."""
    monkeypatch.setattr("recserve.search.slates.still_open", None)
    for seed in range(6):
        free = world.drawn(seed, caps=())
        loose = replace(free, caps=(Cap(PrefixGroups(world.trie, 0), 1000),))
        one, other = world.engine.run(free), world.engine.run(loose)
        assert one.rows.tolist() == other.rows.tolist()
        assert one.rounds <= other.rounds <= world.trie.num_levels


@pytest.mark.parametrize("strategy", ["beam", "speculative"])
def test_dense_weight_and_caps(strategy):
    world = World()
    for seed in range(18):
        request = world.drawn(seed, strategy=strategy, dense_weight=1.5)
        slate = world.engine.run(request)
        rows = slate.rows.tolist()
        assert slate.exact and (np.diff(slate.scores) <= 0).all()
        assert plain_first_k(rows, request.caps, len(rows)) == rows
        if len(rows) < request.k:
            assert plain_open(rows, request.caps, world.legal(request)) == []
        beam = world.engine.run(replace(request, strategy="beam"))
        assert rows == beam.rows.tolist()


def test_thirty_prefixes_of_their_own():
    """One item of each first code: ten of the model's, whatever the beams hold at first."""
    codes = torch.tensor([[i % 30, i // 30 % 10, i // 300] for i in range(1500)])
    model, trie = make(codes, "items", "children")
    engine = build_engine(EngineModels(model), CONFIG)
    cap, again = Cap(PrefixGroups(trie, 0), 1), 0
    for seed in range(8):
        request = SlateQuery(
            prefix=draw_prefix(model, 6, seed), trie=trie, k=10, beam_width=10, caps=(cap,)
        )
        slate = engine.run(request)
        again += slate.rounds > trie.num_levels
        assert len(set(codes[slate.rows, 0].tolist())) == slate.rows.size == 10
        everything = engine.run(replace(request, k=30, beam_width=30))
        assert everything.rows.size == 30  # there are no more
    assert again


def test_a_deadline_ends_the_searches(world, monkeypatch):
    monkeypatch.setattr("recserve.engine.round_scheduler.has_expired", lambda request: True)
    requests = [world.drawn(seed) for seed in range(12)]
    futures = [world.engine.submit(request) for request in requests]
    while world.engine.step():
        pass
    late = [type(future.exception()).__name__ for future in futures if future.exception()]
    assert late and set(late) == {"DeadlineExceeded"} and len(late) < len(futures)
    lane = world.engine.schedulers["recommender"]
    assert lane.kv.allocator.num_free + lane.kv.prefixes.num_pages == lane.kv.allocator.num_pages
