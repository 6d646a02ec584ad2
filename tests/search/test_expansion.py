"""What cannot enter an answer is left out, and the answer is that of full beam search."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recserve.core.diversity import Cap, PrefixGroups
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.trie.trie import build_trie
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.search.beam_search import (
    NO_THRESHOLD,
    Beams,
    BeamSearch,
    search_step,
    threshold_ranks,
)
from recserve.search.filters import RequestFilters
from recserve.search.strategy import Heads
from recserve.search.trie_paths import ScoredPaths
from tests.support.grids import covering
from tests.support.recommenders import CATALOGUES, FORMS, draw_prefix, make

SMALL = EngineConfig(kv_bytes=2**24)


def drawn_trie(rng, items: int, levels: int, codes: int):
    drawn = np.unique(rng.integers(0, codes, (items, levels)), axis=0)
    return build_trie(torch.from_numpy(drawn), (codes,) * levels)


def drawn_gains(rng, trie, step: float) -> torch.Tensor:
    """Log-probability of every node under its parent, in multiples of `step` so that sums tie."""
    gains = torch.from_numpy(-rng.integers(0, 6, trie.num_nodes) * step).float()
    only = trie.num_children(trie.parents[1:]) == 1
    gains[1:][only] = 0.0
    return gains


def plain_search(trie, gains, width: int) -> list[tuple[float, int]]:
    """Beam search in Python over every child: (score, leaf), best first, ties by node."""
    beams = [(0.0, 0)]
    for _ in range(trie.num_levels):
        grown = [
            (score + float(gains[child]), child)
            for score, node in beams
            for child in range(int(trie.first_child[node]), int(trie.first_child[node + 1]))
        ]
        beams = sorted(grown, key=lambda beam: (-beam[0], beam[1]))[:width]
    return beams


def bounded_search(trie, gains, width: int, k: int) -> tuple[list[tuple[float, int]], int]:
    """The first k of the same by `search_step` with thresholds, and how many forks were opened."""
    tails, beams, opened = torch.zeros(1, 1), Beams.root(1, torch.device("cpu")), 0
    search = BeamSearch(make(CATALOGUES["ordinary"], "items", "children")[0], (), [], trie,
                        RequestFilters(trie, (None,)), tails, ScoredPaths.empty(tails),
                        beams, [width], [k - 1])  # fmt: skip
    for _ in range(trie.num_levels):
        opened += int(search.needs_state(beams).sum())
        children = trie.children(beams.nodes[0])
        logits = torch.zeros(len(children.nodes), max(trie.codebook_sizes))
        row, column = children.valid.nonzero(as_tuple=True)
        logits[row, children.codes[row, column].long()] = gains[children.nodes[row, column]]
        scores = SimpleNamespace(logits=lambda _, own=logits: (own, torch.zeros(len(own))))
        beams = search_step(search.space(), beams, scores)
    found = list(zip(beams.log_probs[0].tolist(), beams.nodes[0].tolist(), strict=True))
    return found[:k], opened


def test_the_k_best_of_drawn_searches_stay():
    """30 tries with ties: the first k are those of the plain search, and fewer prefixes are
    opened.
    """
    rng = np.random.default_rng(0)
    opened = np.zeros(2)
    for _ in range(30):
        trie = drawn_trie(rng, int(rng.integers(1, 120)), int(rng.integers(2, 6)), 5)
        gains = drawn_gains(rng, trie, 0.5)
        width = int(rng.integers(2, 12))
        k = int(rng.integers(1, max(width // 3, 2)))
        found, few = bounded_search(trie, gains, width, k)
        assert found == plain_search(trie, gains, width)[:k]
        opened += few, bounded_search(trie, gains, width, NO_THRESHOLD)[1]
    assert opened[0] < 0.9 * opened[1]


def test_an_item_that_set_the_bound_may_be_displaced():
    """Width 2, k 1. Item X (-1) bounds level 1; at level 2 two prefixes (0) stand before it, so
    full beam search loses it, and all that is left at the end is far below the old bound.

        0 -+- 00 -+- 000 (-5)       1 --- 10 --- 100 = X (-1)
           |      `- 001 (-6)
           `- 01 -+- 010 (-7)
                  `- 011 (-8)
    """
    codes = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0]])
    trie = build_trie(codes, (2, 2, 2))
    gains = torch.zeros(trie.num_nodes)
    gains[2] = -1.0
    gains[trie.any_leaf : trie.any_leaf + 4] = torch.tensor([-5.0, -6.0, -7.0, -8.0])
    found, _ = bounded_search(trie, gains, 2, 1)
    assert found == [(-5.0, trie.any_leaf)] == plain_search(trie, gains, 2)[:1]
    assert bounded_search(trie, gains, 3, 1)[0] == [(-1.0, trie.any_leaf + 4)]


@pytest.mark.parametrize(
    "codes,form,strategy,tied",
    covering(CATALOGUES, FORMS, ("beam", "speculative", "nezha"), (False, True), pairs=True),
)
def test_fewer_items_are_the_first_of_more(codes, form, strategy, tied):
    """With k under the width a slate is the beginning of the slate of all beams, which no bound
    touches: in one batch, filtered, with the dense head's dense_candidates, where scores tie.
    """
    model, trie = make(codes, *form)
    if tied:
        model.head.weight.data.zero_()
    heads = [SelfDraftHead(SelfDraftConfig(32, model.config.codebook_sizes)) for _ in range(2)]
    engine = build_engine(EngineModels(model, heads=Heads(*(head.eval() for head in heads))), SMALL)
    rng = np.random.default_rng(0)
    requests = []
    for seed, (k, width) in enumerate(product((1, 2, 5), (3, 8, 20))):
        excluded = rng.integers(0, len(codes), len(codes) // 5) if seed % 2 else None
        weight = 1.5 * (seed % 3 == 0) if form[0] == "items" else 0.0
        request = SlateQuery(
            prefix=draw_prefix(model, 3 + seed, seed),
            trie=trie,
            k=k,
            beam_width=width,
            strategy=strategy,
            excluded=excluded,
        )
        requests.append(replace(request, dense_weight=weight))
    whole = engine.run_many([replace(r, k=r.width) for r in requests])
    for answers in (engine.run_many(requests), [engine.run(r) for r in requests]):
        for request, few, all_ in zip(requests, answers, whole, strict=True):
            assert few.rows.tolist() == all_.rows[: request.k].tolist()
            np.testing.assert_allclose(few.scores, all_.scores[: request.k], atol=2e-5)
            if strategy == "beam":
                assert few.timing.nodes <= all_.timing.nodes


def test_the_bound_saves_nodes_and_rounds():
    """A catalogue of nine items below every tenth prefix: most of a level is items already."""
    rows = [[a, b, c] for a in range(8) for b in range(20) for c in range(9 if b % 10 == 0 else 1)]
    model, trie = make(torch.tensor(rows), "items", "children")
    engine = build_engine(EngineModels(model), SMALL)
    requests = [
        SlateQuery(prefix=draw_prefix(model, 5, seed), trie=trie, k=3, beam_width=40)
        for seed in range(8)
    ]
    few = engine.run_many(requests)
    many = engine.run_many([replace(request, k=40) for request in requests])
    assert sum(a.timing.nodes for a in few) < 0.8 * sum(a.timing.nodes for a in many)
    weighed = engine.run_many([replace(request, dense_weight=1.0) for request in requests])
    more = engine.run_many([replace(request, k=40, dense_weight=1.0) for request in requests])
    assert sum(a.timing.nodes for a in weighed) < sum(a.timing.nodes for a in more)
    assert sum(a.rounds for a in weighed) < sum(a.rounds for a in more)


def test_where_nothing_may_be_left_out():
    """As many items as beams, or caps, which let items of lower scores in."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    request = SlateQuery(prefix=draw_prefix(model, 3, 0), trie=trie, k=4, beam_width=9)
    cap = Cap(PrefixGroups(trie, 0), 1)
    free = [replace(request, k=9), replace(request, k=12), replace(request, caps=(cap,))]
    assert threshold_ranks(free) is None
    assert threshold_ranks([request, *free]) == [3, NO_THRESHOLD, NO_THRESHOLD, NO_THRESHOLD]


def test_what_forks_below_the_last_levels_is_scored_in_the_same_round():
    """From the level on below which less and less forks, one round goes to the leaves."""
    rng = np.random.default_rng(0)
    rows = [[a, b, c, d]
            for a in range(6) for b in range(8)
            for c in range(1 + 2 * (b % 3 == 0)) for d in range(1 + (c == 1))]  # fmt: skip
    codes = torch.tensor(rows)[torch.from_numpy(rng.permutation(len(rows)))]
    model, trie = make(codes, "items", "children")
    assert trie.closing_level == 2
    requests = [
        SlateQuery(prefix=draw_prefix(model, 5, i), trie=trie, k=12, beam_width=12)
        for i in range(6)
    ]
    engine = build_engine(EngineModels(model), SMALL)
    together = engine.run_many(requests)
    trie.__dict__["closing_level"] = trie.num_levels
    apart = engine.run_many(requests)
    for one, two in zip(together, apart, strict=True):
        assert one.rows.tolist() == two.rows.tolist()
        assert one.rounds <= 2 and one.rounds <= two.rounds
        assert one.timing.nodes <= two.timing.nodes + 12
    assert sum(a.rounds for a in apart) > sum(a.rounds for a in together)
