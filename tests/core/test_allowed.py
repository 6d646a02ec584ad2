"""Filters as bits and lists: counts against plain loops, slates against scoring all items."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems, packed_rows
from recserve.core.request import LikelihoodQuery, SlateQuery
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import LeafFilter, build_trie
from recserve.search.filters import RequestFilters, leaf_filter
from tests.support.grids import covering
from tests.support.leaf_counts import remaining
from tests.support.recommenders import draw_prefix
from tests.support.tries import SHAPES, Changed, engine_of

PATHS = ["auto", "torch"]


@pytest.fixture(params=SHAPES, ids=SHAPES.keys())
def changed(request):
    return Changed(*SHAPES[request.param])


def draw_items(draw, num_rows, known, earlier=None):
    """A filter over the first rows in bits, and of some rows, the later ones too, something else;
    and the same as a bitmap.
    """
    bits = packed_rows(draw.random(known) < 0.6) if earlier is None else earlier.bits
    rows = np.unique(np.concatenate([draw.integers(0, num_rows, 12), np.arange(known, num_rows)]))
    said = draw.random(rows.size) < 0.5
    bitmap = np.zeros(num_rows, dtype=bool)
    bitmap[:known] = np.unpackbits(bits, count=known, bitorder="little")
    bitmap[rows] = said
    return AllowedItems(bits, num_rows, rows, said, earlier), bitmap


def left_at(changed, usable):
    """[nodes of the rebuilt trie] usable items under each node, one after another."""
    rebuilt = changed.rebuilt
    rows, ranges = rebuilt.leaf_rows.tolist(), rebuilt.leaves(torch.arange(rebuilt.num_nodes))
    pairs = zip(ranges.first.tolist(), ranges.last.tolist(), strict=True)
    return [sum(usable[row] for row in rows[first:last]) for first, last in pairs]


def draw_filters(changed, draw):
    """Filters of every kind over one version, and the rows that each leaves."""
    items, bitmap = draw_items(draw, changed.num_rows, len(changed.base_codes))
    filters, usable = [], []
    for excluded in (None, draw.choice(changed.rows.numpy(), 6)):
        for allowed in (None, items):
            left = np.ones(changed.num_rows, bool) if allowed is None else bitmap.copy()
            left[changed.hidden] = False
            if excluded is not None:
                left[excluded] = False
            filters.append(leaf_filter(changed.trie, excluded, allowed))
            usable.append(left)
    few = changed.rows[:5]
    filters.append(LeafFilter(added=changed.trie.leaf_ranks(few).sort().values))
    usable.append(np.isin(np.arange(changed.num_rows), few.numpy()))
    return filters, usable


@pytest.mark.parametrize("kernels", PATHS)
def test_what_is_left_at_every_node_is_counted(changed, kernels, force_kernels):
    """By a request's own lists, and in the bits that requests of all kinds share a table of."""
    force_kernels(kernels)
    draw = np.random.default_rng(1)
    filters, usable = draw_filters(changed, draw)
    together = RequestFilters(changed.trie, tuple(filters)).in_bits()
    nodes = changed.node.expand(len(filters), -1)
    in_bits = together.remaining(changed.trie, nodes)
    for b, (own, left) in enumerate(zip(filters, usable, strict=True)):
        expected = left_at(changed, left)
        assert in_bits[b].tolist() == expected
        if own is not None:
            assert remaining(own, changed.trie, changed.node).tolist() == expected


def test_lists_alone_are_read_as_lists(changed):
    """Where no request has bits; the same counts."""
    filters, usable = draw_filters(changed, np.random.default_rng(2))
    plain = [f for f in filters if f is None or f.all]
    left = RequestFilters(changed.trie, tuple(plain)).batch
    assert left.bits is None and left.excluded is not None
    found = left.remaining(changed.trie, changed.node.expand(2, -1))
    assert [row.tolist() for row in found] == [left_at(changed, usable[b]) for b in (0, 2)]
    nothing = RequestFilters(changed.rebuilt, (None, None)).batch
    assert nothing.bits is None and nothing.excluded is None


def test_versions_share_the_bits_and_nothing_that_changed(changed):
    """Back and forth between versions over one base, then over a base that was folded anew: what
    was compiled for one is never read by another.
    """
    draw = np.random.default_rng(3)
    known, base = len(changed.base_codes), changed.base
    empty = torch.empty(0, len(base.codebook_sizes), dtype=torch.int64)
    first = AllowedItems(packed_rows(draw.random(known) < 0.6), known)
    shared = first.leaves(base).base
    earlier = first
    for step in range(6):
        items, bitmap = draw_items(draw, changed.num_rows, known, earlier)
        bitmap[changed.hidden] = False
        leaves = items.leaves(changed.trie)
        assert leaves.base is shared and items.leaves(changed.trie) is leaves
        found = leaf_filter(changed.trie, None, items)
        left = remaining(found, changed.trie, changed.node)
        assert left.tolist() == left_at(changed, bitmap), step
        earlier = items
    words, bitmap = draw_items(draw, known, known, earlier)  # of the base's own trie
    found, every = leaf_filter(base, None, words), torch.arange(base.num_nodes)
    ranges = base.leaves(every)
    rows = bitmap[base.leaf_rows.numpy()]
    left = [rows[a:b].sum() for a, b in zip(ranges.first, ranges.last, strict=True)]
    assert remaining(found, base, every).tolist() == left
    assert {ranks.dtype for ranks in (found.added, *found.excluded)} == {torch.int64}
    again = AllowedItems(first.bits, known, earlier=earlier)
    assert again.leaves(base).base is shared
    assert not again.leaves(base).added.shape[0] and not again.leaves(base).removed.shape[0]
    folded = insert_items(changed.rebuilt, empty, empty[:, 0], changed.num_rows)
    for step in range(4):
        items, bitmap = draw_items(draw, changed.num_rows, known, earlier)
        found = leaf_filter(folded, None, items)
        every = torch.arange(changed.rebuilt.num_nodes)
        assert remaining(found, folded, every).tolist() == left_at(changed, bitmap), step
        assert items.leaves(folded).base is not shared
        earlier = items


def test_rows_are_looked_up_as_in_a_bitmap():
    draw = np.random.default_rng(4)
    for known, num_rows in ((1, 1), (8, 8), (9, 30), (300, 512)):
        items, bitmap = draw_items(draw, num_rows, known)
        assert items.mask().tolist() == bitmap.tolist() and items.count == bitmap.sum()
        rows = draw.integers(0, num_rows, (3, 40))
        assert items.at(rows).tolist() == bitmap[rows].tolist()
    assert AllowedItems.of(bitmap).mask().tolist() == bitmap.tolist()


def test_an_item_takes_three_bits():
    """1/8 byte for the rows, 1/4 for the leaves; a version with nothing of its own adds nothing."""
    codes = torch.cartesian_prod(*[torch.arange(10)] * 4)
    changed = insert_items(base := _trie(codes), codes[:0], codes[:0, 0], len(codes))
    items = AllowedItems.of(np.arange(len(codes)) % 2 == 0)
    items.leaves(base)
    assert items.num_bytes <= 0.376 * len(codes) + 8
    later = AllowedItems(items.bits, len(codes), earlier=items)
    later.leaves(changed)
    assert later.num_bytes == items.num_bytes


def _trie(codes):
    return build_trie(codes, (10,) * codes.shape[1])


@pytest.mark.parametrize(
    "shape,kernels,dense_weight",
    covering(("drawn", "deep", "narrow"), PATHS, {"plain": 0.0, "dense": 0.5}),
)
def test_slates_are_the_best_of_all_scored_items(shape, kernels, dense_weight, force_kernels):
    """In one batch: a filter, exclusions, both, another filter with few items, nothing at all;
    beams wide enough for all, and narrow ones that the filter must not starve.
    """
    force_kernels(kernels)
    changed = Changed(*SHAPES[shape])
    model, engine = engine_of(changed)
    model.pack()
    draw = np.random.default_rng(5)
    prefix = draw_prefix(model, 4, 0)
    live = np.setdiff1d(changed.rows.numpy(), changed.hidden)
    scored = engine.run(LikelihoodQuery(prefix, changed.trie, live)).values[:, 0]
    half, bitmap = draw_items(draw, changed.num_rows, len(changed.base_codes))
    three = np.isin(np.arange(changed.num_rows), live[:3])
    plain = SlateQuery(
        prefix=prefix, trie=changed.trie, k=5, beam_width=2 * len(live), dense_weight=dense_weight
    )
    asked, usable = [], []
    for allowed, mask in ((None, None), (half, bitmap), (AllowedItems.of(three), three)):
        for count in (0, 4):
            excluded = draw.choice(live, count) if count else None
            left = np.ones(changed.num_rows, bool) if mask is None else mask.copy()
            left[[] if excluded is None else excluded] = False
            asked.append(replace(plain, allowed=allowed, excluded=excluded))
            asked.append(replace(asked[-1], k=2, beam_width=2))
            usable += [left, left]
    for strategy in ("beam", "speculative"):
        together = engine.run_many([replace(r, strategy=strategy) for r in asked])
        for request, slate, left in zip(asked, together, usable, strict=True):
            kept = left[live]
            assert left[slate.rows].all() and len(slate.rows) == min(request.k, kept.sum())
            if request.k == 5 and not dense_weight:
                best = live[kept][np.lexsort((live[kept], -scored[kept]))]
                np.testing.assert_allclose(
                    slate.scores, np.sort(scored[kept])[::-1][:5], rtol=1e-4, atol=1e-4
                )
                assert len(set(slate.rows.tolist()) - set(best[:6].tolist())) == 0
