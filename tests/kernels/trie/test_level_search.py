"""One level of beam search: against a plain loop, and in Triton."""

import math

import pytest
import torch

from recserve.kernels.trie.fixed_trie import NOWHERE, FixedTrie
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.level_search import ChildQuery, best_children_reference, unpacked
from recserve.kernels.trie.trie import BatchFilter, build_trie, pack_leaves, popcount
from tests.support.grids import covering, thin
from tests.support.tries import CATALOGUES

DEAD = float("-inf")
FORMS = ["children", "normalized", "allowed", "excluded", "excluded, wide"]


def build(codes):
    sizes = tuple(int(codes[:, level].max()) + 1 for level in range(codes.shape[1]))
    return build_trie(codes, sizes)


def draw_level(trie, level, batch, width, seed=0, coarse=False):
    """Beams of one level: distinct nodes, some of them dead; logits of the level's codes."""
    g = torch.Generator().manual_seed(seed)
    start, stop = trie.level_starts[level], trie.level_starts[level + 1]
    width = min(width, stop - start)
    nodes = torch.stack([torch.randperm(stop - start, generator=g)[:width] for _ in range(batch)])
    log_probs = -torch.rand(batch, width, generator=g) * 5
    logits = torch.randn(batch * width, trie.codebook_sizes[level], generator=g)
    if coarse:
        log_probs, logits = log_probs.round(), logits.round()
    dead = torch.rand(batch, width, generator=g) < 0.2
    dead[:, 0] = False
    return (nodes + start).masked_fill(dead, 0), log_probs.masked_fill(dead, DEAD), logits


def draw_filters(trie, batch, seed=0):
    g = torch.Generator().manual_seed(seed)
    allowed = torch.rand(batch, trie.num_items, generator=g) < 0.4
    count = max(trie.num_items // 3, 1)
    ranks = [
        torch.randperm(trie.num_items, generator=g)[:count].sort().values for _ in range(batch)
    ]
    excluded = torch.stack(ranks)
    excluded[0, 1:] = trie.num_items
    return allowed, excluded.int()


def plain(trie, nodes, log_probs, logits, keep, allowed):
    """Child by child."""
    answer = []
    for b in range(nodes.shape[0]):
        found = []
        for w in range(nodes.shape[1]):
            if log_probs[b, w] == DEAD:
                continue
            node = int(nodes[b, w])
            children = range(int(trie.first_child[node]), int(trie.first_child[node + 1]))
            row = logits[b * nodes.shape[1] + w].double()
            total = math.log(sum(math.exp(row[int(trie.node_codes[c])]) for c in children))
            for c in children:
                if bool(allowed[b, int(trie.first_leaf[c]) : int(trie.last_leaf[c])].any()):
                    score = float(log_probs[b, w]) + float(row[int(trie.node_codes[c])]) - total
                    found.append((-score, c, w))
        answer.append(sorted(found)[:keep])
    return answer


@pytest.mark.parametrize("form", ["all", "allowed", "excluded"])
@pytest.mark.parametrize("codes", CATALOGUES.values(), ids=CATALOGUES.keys())
def test_best_children_are_those_of_a_plain_loop(codes, form):
    trie = build(codes)
    for level, width in enumerate(trie.widths):
        nodes, log_probs, logits = draw_level(trie, level, 3, 9, seed=level)
        allowed, excluded = draw_filters(trie, 3, seed=level)
        filters = BatchFilter()
        if form == "allowed":
            filters = BatchFilter(bits=pack_leaves(allowed))
        elif form == "excluded":
            filters = BatchFilter(excluded)
            allowed = torch.ones_like(allowed)
            for b in range(3):
                allowed[b, excluded[b][excluded[b] < trie.num_items].long()] = False
        else:
            allowed = torch.ones_like(allowed)
        query = ChildQuery(nodes, log_probs, logits, width, 6, filters=filters)
        got = best_children_reference(trie, query)
        for b, expected in enumerate(plain(trie, nodes, log_probs, logits, 6, allowed)):
            alive = got.log_probs[b] > DEAD
            assert got.nodes[b][alive].tolist() == [c for _, c, _ in expected]
            assert got.parents[b][alive].tolist() == [w for _, _, w in expected]
            scores = torch.tensor([-s for s, _, _ in expected])
            torch.testing.assert_close(got.log_probs[b][alive], scores, rtol=1e-5, atol=1e-5)
            assert (got.nodes[b][~alive] == 0).all()


def test_counts_of_allowed_leaves():
    g = torch.Generator().manual_seed(0)
    for items in (1, 31, 32, 33, 500):
        allowed = torch.rand(2, items, generator=g) < 0.5
        ranks = torch.arange(items + 1).expand(2, -1)
        expected = torch.cat([torch.zeros(2, 1, dtype=torch.int64), allowed.cumsum(1)], 1)
        assert torch.equal(pack_leaves(allowed).before(ranks).long(), expected)
    words = torch.tensor([0, -1, 1, -(2**31), 0x12345678], dtype=torch.int32)
    assert popcount(words).tolist() == [0, 32, 1, 1, 13]


def test_both_filters_at_once_are_refused():
    trie = build(CATALOGUES["drawn"])
    allowed, excluded = draw_filters(trie, 1)
    with pytest.raises(ValueError, match="clear the excluded"):
        BatchFilter(excluded, pack_leaves(allowed))


def allowed_of(trie, allowed):
    """Those of the base as bits, later ones as a list. allowed [B, I] bool over leaf ranks."""
    kept = torch.ones(trie.num_items, dtype=torch.bool)
    later = torch.empty(0, dtype=torch.int64)
    if trie.insertions is not None:
        later = trie.insertions.ranks
    kept[later] = False
    ranks = later.expand(len(allowed), -1)
    ranks = ranks.masked_fill(~allowed[:, later], trie.num_items).sort().values
    return BatchFilter(bits=pack_leaves(allowed[:, kept]), added=ranks if ranks.shape[1] else None)


def options_of(form, trie, logits, allowed, excluded):
    return {
        "children": {},
        "normalized": {"normalizers": logits.logsumexp(-1)},
        "allowed": {"filters": allowed_of(trie, allowed)},
        "excluded": {"filters": BatchFilter(excluded)},
        "excluded, wide": {
            "filters": BatchFilter(excluded.long())
        },  # as recorded searches hold them
    }[form]


def small_blocks(monkeypatch):
    """Makes nodes of many children take many programs, whose sums are merged in several turns."""
    from recserve.kernels.trie import triton_topk

    monkeypatch.setattr(triton_topk, "MOST_CHILDREN", 4)
    monkeypatch.setattr(triton_topk, "PARTS", 2)


@pytest.mark.parametrize("blocks,codes,form", covering(("many", "one"), CATALOGUES, FORMS))
def test_triton_matches_torch(codes, form, blocks, monkeypatch):
    from recserve.kernels.trie import triton_topk
    from tests.support import triton_interpreter  # noqa: F401

    if blocks == "many":
        small_blocks(monkeypatch)
    trie = build(codes)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(2**62))
    for level, width in enumerate(trie.widths):
        nodes, log_probs, logits = draw_level(trie, level, 2, 5, seed=level)
        allowed, excluded = draw_filters(trie, 2, seed=level)
        options = options_of(form, trie, logits, allowed, excluded)
        query = ChildQuery(nodes, log_probs, logits, width, 7, **options)
        expected = best_children_reference(trie, query)
        got = triton_topk.best_children(trie, query)
        torch.testing.assert_close(got.log_probs, expected.log_probs)
        assert torch.equal(got.nodes, expected.nodes)
        assert torch.equal(got.parents, expected.parents)


@pytest.mark.parametrize(
    "blocks,name,form",
    thin(covering(("one", "many"), ("one-item", "all-share-a-prefix", "deep", "drawn"), FORMS), 3),
)
def test_triton_matches_torch_with_insertions(name, form, blocks, monkeypatch):
    """Later ids below every level, as they come and in a place with room to spare; and none."""
    from recserve.kernels.trie import triton_topk
    from tests.support import triton_interpreter  # noqa: F401

    if blocks == "many":
        small_blocks(monkeypatch)
    codes = CATALOGUES[name]
    sizes = tuple(int(codes[:, level].max()) + 2 for level in range(codes.shape[1]))
    base = build_trie(codes, sizes)
    g = torch.Generator().manual_seed(5)
    drawn = torch.stack([torch.randint(0, size, (25,), generator=g) for size in sizes], 1)
    drawn = torch.unique(drawn, dim=0)
    rows = torch.arange(len(drawn)) + len(codes)
    grown = insert_items(base, drawn, rows, len(codes) + len(drawn))
    nothing = insert_items(base, drawn[:0], rows[:0], len(codes))
    fixed = FixedTrie(base, 30)
    for version in (grown, nothing):
        paths = version.nodes_of_items(torch.arange(version.num_rows))
        for level, width in enumerate(version.widths):
            above = torch.zeros(1, 1).long() if not level else paths[:, level - 1 : level]
            nodes = torch.unique(above)[-4:].expand(2, -1)
            log_probs = -torch.rand(nodes.shape, generator=g)
            log_probs[1, 1:2] = DEAD
            logits = torch.randn(nodes.numel(), sizes[level], generator=g)
            allowed, excluded = draw_filters(version, 2, seed=level)
            options = options_of(form, version, logits, allowed, excluded)
            query = ChildQuery(nodes, log_probs, logits, width, 12, **options)
            expected = best_children_reference(version, query)
            fixed.load(version)
            for trie in (version, fixed.trie) if level == 1 else (fixed.trie,):
                got = triton_topk.best_children(trie, query)
                torch.testing.assert_close(got.log_probs, expected.log_probs)
                assert torch.equal(got.nodes, expected.nodes)
                assert torch.equal(got.parents, expected.parents)


@pytest.mark.parametrize("filtered", [False, True])
def test_requests_without_listed_leaves_search_no_list(filtered, monkeypatch):
    """A captured search has places for 1,024 leaves, of which most requests use none."""
    from recserve.kernels.trie import triton_topk
    from tests.support import triton_interpreter

    trie = build(CATALOGUES["drawn"])
    nodes, log_probs, logits = draw_level(trie, 1, 2, 3, seed=1)
    places = torch.full((2, 40), NOWHERE)
    if filtered:
        places[1, 0] = 0
    query = ChildQuery(nodes, log_probs, logits, trie.widths[1], 12, filters=BatchFilter(places))
    builder, searches = triton_interpreter.interpreter.InterpreterBuilder, []
    load, first = builder.create_masked_load, places.data_ptr()
    last = first + places.numel() * places.itemsize

    def counted(self, pointers, mask, *rest):
        found = (first <= pointers.data) & (pointers.data < last) & mask.data
        # The first place of a request is read by itself.
        searches.append(found.size > 1 and found.any())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counted)
    found = triton_topk.best_children(trie, query)
    assert torch.equal(found.nodes, best_children_reference(trie, query).nodes)
    assert any(searches) == filtered


@pytest.mark.parametrize("form", ["allowed", "excluded"])
def test_rows_past_2_31_elements_are_addressed(form, monkeypatch):
    """The first beam is far down the batch: logits, keys and filters of those above are not there,
    but their numbers count.
    """
    from recserve.kernels.trie import triton_topk
    from tests.support import triton_interpreter

    trie = build(CATALOGUES["drawn"])
    nodes, log_probs, logits = draw_level(trie, 1, 2, 9, seed=1)
    allowed, excluded = draw_filters(trie, 2, seed=1)
    beams, width, codes = nodes.shape[1], trie.widths[1], logits.shape[1]
    filler = 64 * beams
    shift = (2**31 // min(codes, width) // beams + 3) * beams
    bits = pack_leaves(allowed)
    words, counts, ranks = (
        torch.cat([x, x.new_full((2, filler), fill)], dim=1)
        for x, fill in ((bits.words, 0), (bits.counts, 0), (excluded, 2**31 - 1))
    )
    filters = BatchFilter(excluded) if form == "excluded" else BatchFilter(bits=bits)
    query = ChildQuery(nodes, log_probs, logits, width, 12, filters=filters)
    expected = best_children_reference(trie, query)
    size = words.shape[1] if form == "allowed" else ranks.shape[1]
    assert shift * codes > 2**31 < shift * width and shift // beams * size > 2**31
    kind = triton_topk.ALLOWED if form == "allowed" else triton_topk.EXCLUDED

    def far(tensor, row):
        return triton_interpreter.Far(tensor, shift * row, monkeypatch)

    filters = [
        triton_interpreter.Far(x, shift // beams * size, monkeypatch)
        for x in (ranks, words, counts)
    ]
    keys = torch.full((2, beams * width), -(2**62))
    triton_interpreter.start_programs_at(shift, monkeypatch)
    triton_topk.children_kernel[(2 * beams,)](
        trie.first_child, trie.node_codes, trie.first_leaf, trie.last_leaf, *[nodes] * 7,
        far(nodes, 1), far(log_probs, 1), far(logits, codes), *[far(log_probs, 1)] * 3, *filters,
        far(keys, width), beams, codes, width, ranks.shape[1] * (form != "allowed"),
        words.shape[1], trie.num_nodes, 0, 0, 0 if form == "allowed" else size.bit_length(), 0,
        BLOCK=2 ** (width - 1).bit_length(), BLOCK_PARTS=triton_topk.PARTS, FILTER=kind.value,
        SUMS=triton_topk.AT_ONCE.value, INSERTIONS=False,
    )  # fmt: skip
    got = unpacked(keys, width, 12)
    torch.testing.assert_close(got.log_probs, expected.log_probs)
    assert torch.equal(got.nodes, expected.nodes) and torch.equal(got.parents, expected.parents)
