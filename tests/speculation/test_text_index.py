"""Lookup drafters against plain searches through the text."""

import random
from collections import Counter

import numpy as np
import pytest

from recserve.kernels import dispatch
from recserve.kernels.cpu import native
from recserve.speculation.drafters.lookup import ANCHORS, LOOKED_AT, SuffixLimits
from recserve.speculation.drafters.ngram import NgramDrafter
from recserve.speculation.drafters.suffix import SuffixDrafter
from recserve.speculation.drafters.text_index import GAP, TextIndex
from recserve.speculation.text import Budget, TextContext
from recserve.speculation.text_request import SamplingParams, Speculation
from tests.support.text_loop import check_draft
from tests.support.token_paths import drawn_text, paths


@pytest.fixture(params=["c", "plain"])
def way(request, monkeypatch):
    """Drafters that are made look up in C, and then plainly."""
    if request.param == "c" and native.library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(dispatch, "KERNELS", "auto" if request.param == "c" else "torch")


def context(tokens, id=0, num_prompt=None, rule="sample", num_tokens=None) -> TextContext:
    speculation = Speculation("test", rule, num_tokens)
    return TextContext(
        id, tokens, len(tokens) if num_prompt is None else num_prompt, SamplingParams(), speculation
    )


@pytest.mark.parametrize("capacity", [None, 7, 50, 400])
def test_index_finds_what_a_search_finds(capacity):
    text = drawn_text(0, 300, 5)
    text[60] = text[61] = text[150] = GAP
    index, lengths = TextIndex((1, 2, 4), capacity), (1, 2, 4)
    for stop in range(1, len(text) + 1):
        index.extend(text[stop - 1 : stop])
        start = max(0, stop - (capacity or stop))
        for n in lengths:
            tail = text[stop - n : stop] if stop >= n else []
            ends = [
                end
                for end in range(stop - 2, -1, -1)
                if end - n + 1 >= 0 and text[end - n + 1 : end + 1] == tail and end >= start
            ]
            ends = [] if GAP in tail else ends
            assert index.ends(n, 1000) == ends
            assert index.ends(n, 2) == ends[:2]
            if tail and GAP not in tail:
                assert index.ends_of(tail, 1000) == [stop - 1, *ends]
    if capacity is not None:
        assert len(index._heads) <= capacity * len(lengths)
        assert len(index._tokens) == capacity


def test_following_and_matches_stop_at_gaps_and_ends():
    index = TextIndex((1,))
    index.extend([1, 2, 3, GAP, 1, 2, 3, 4])
    ends = np.array([0, 4, 6, 7])
    following = [[2, 3, GAP], [2, 3, 4], [4, GAP, GAP], [GAP, GAP, GAP]]
    assert index.following(ends, 3).tolist() == following
    assert index.matches(ends, np.array([9, 2, 3, 4])).tolist() == [0, 0, 0, 3]
    assert index.matches(ends, np.array([8, 1])).tolist() == [1, 1, 0, 0]


def plain_continuation(text, end, depth) -> list[int]:
    grown = list(text)
    for i in range(depth):
        grown.append(grown[end + 1 + i])
    return grown[len(text) :]


def plain_ngram(text, low, high, depth, branches, num_nodes) -> set[tuple[int, ...]]:
    """Prefixes of the continuations, longest match first, newest first."""
    nodes: dict[tuple[int, ...], None] = {}
    seen, used = set(), 0
    for n in range(high, low - 1, -1):
        ends = [
            e
            for e in range(len(text) - 2, n - 2, -1)
            if len(text) >= n and text[e - n + 1 : e + 1] == text[-n:]
        ]
        for end in ends[: LOOKED_AT * branches]:
            if end in seen or used == branches:
                continue
            seen.add(end)
            before = len(nodes)
            tokens = plain_continuation(text, end, depth)
            for i in range(1, depth + 1):
                if tuple(tokens[:i]) not in nodes and len(nodes) == num_nodes:
                    break
                nodes[tuple(tokens[:i])] = None
            used += len(nodes) > before
    return set(nodes)


@pytest.mark.parametrize("vocabulary", [1, 2, 4, 20])
@pytest.mark.parametrize("branches", [1, 3])
def test_ngram_drafts_what_a_search_finds(vocabulary, branches, way):
    drafter = NgramDrafter(min_match=1, max_match=4, num_tokens=6, branches=branches)
    text = drawn_text(vocabulary, 160, vocabulary)
    rng = random.Random(1)
    stop = 1
    while stop < len(text):
        budget = Budget(rng.randrange(0, 20), rng.randrange(0, 9))
        draft = drafter.propose([context(text[:stop])], [budget])[0]
        check_draft(draft, budget, vocabulary)
        nodes = min(budget.num_nodes, 6 * branches)
        depth = min(budget.depth, nodes, 6)
        expected = plain_ngram(text[:stop], 1, 4, depth, branches, nodes) if depth else set()
        assert set(paths(draft)) == expected
        stop += rng.randrange(1, 4)


def test_a_period_is_drafted_past_the_end_of_the_text(way):
    draft = NgramDrafter(num_tokens=7).propose([context([1, 2, 3] * 2)], [Budget(7, 7)])[0]
    assert draft.tokens.tolist() == [1, 2, 3, 1, 2, 3, 1]


def plain_suffix(texts, tail, limits, num_nodes, depth):
    """Best (score, nodes) over match lengths: count continuations by searching the texts."""
    best = (0.0, [])
    for m in range(min(len(tail), limits.max_match), 0, -1):
        counts: Counter = Counter()
        total = 0
        for text in texts:
            for end in range(m - 1, len(text) - 1):
                if text[end - m + 1 : end + 1] == tail[-m:]:
                    total += 1
                    for i in range(1, min(depth, len(text) - 1 - end) + 1):
                        counts[tuple(text[end + 1 : end + 1 + i])] += 1
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        room = min(num_nodes, int(limits.factor * m + limits.offset))
        kept = [(p, c) for p, c in ordered[:room] if c / total >= limits.min_prob]
        score = sum(c for _, c in kept) / max(total, 1)
        if score > best[0]:
            best = (score, [p for p, _ in kept])
    return best


@pytest.mark.parametrize("vocabulary", [2, 4, 20])
def test_suffix_drafts_the_likeliest_tree_of_all_match_lengths(vocabulary, way):
    limits = SuffixLimits(12, 6, 9, 1.3, 0.5, 0.12, occurrences=10_000)
    drafter = SuffixDrafter(limits=limits)
    stored = []
    for number in range(3):
        prompt, output = [0], drawn_text(number, 60, vocabulary)
        ended = context(prompt + output, number, 1)
        drafter.propose([ended], [Budget(4, 4)])
        drafter.forget(number)
        stored.append(output)
    text = drawn_text(9, 150, vocabulary)
    for stop in range(1, len(text)):
        now = text[:stop]
        budget = Budget(stop % 14, stop % 8)
        draft = drafter.propose([context(now, 77)], [budget])[0]
        check_draft(draft, budget, vocabulary)
        nodes, depth = min(budget.num_nodes, 12), min(budget.depth, budget.num_nodes, 6)
        if not depth:
            assert not len(draft)
            continue
        own = plain_suffix([now], now, limits, nodes, depth)
        other = plain_suffix(stored, now, limits, nodes, depth)
        expected = own if own[0] >= other[0] else other
        assert set(paths(draft)) == set(expected[1])


def test_suffix_chain_follows_the_most_frequent_child(way):
    tokens = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3, 7, 1, 2]
    drafter = SuffixDrafter(limits=SuffixLimits(factor=4.0, min_prob=0.01), capacity=0)
    tree = drafter.propose([context(tokens)], [Budget(32, 4)])[0]
    assert (3,) in paths(tree) and (4,) in paths(tree)
    chain = drafter.propose([context(tokens, rule="rejection")], [Budget(32, 4)])[0]
    assert chain.tokens.tolist() == [3, 7, 1, 2]


def test_long_matches_are_found_behind_many_short_ones(way):
    """The long match is older than more occurrences of its last token than are looked at."""
    rare = [11, 12, 13, 14, 15, 16, 17, 5]
    tokens = [*rare, 99, *([5, 6, 7] * 200), *rare]
    limits = SuffixLimits(occurrences=16)
    draft = SuffixDrafter(limits=limits, capacity=0).propose([context(tokens)], [Budget(8, 8)])[0]
    assert draft.tokens.tolist()[:1] == [99]
    assert max(ANCHORS) <= len(rare)


def test_the_store_forgets_its_oldest_and_keeps_its_bound(way):
    drafter = SuffixDrafter(capacity=64)
    for number in range(50):
        drafter.propose([context([1, *range(100, 140)], number, 1)], [Budget(4, 4)])
        drafter.forget(number)
    store = drafter._lookup._store
    assert store.stop - store.start <= 64
    assert not drafter._lookup._texts and not drafter._contexts
    found = drafter.propose([context([120, 121], 99)], [Budget(3, 3)])[0]
    assert found.tokens.tolist()[0] == 122


def test_request_asks_for_fewer_or_no_tokens(way):
    tokens = [1, 2, 3] * 6
    for drafter in (NgramDrafter(branches=2), SuffixDrafter()):
        for asked in (0, 1, 2):
            draft = drafter.propose([context(tokens, num_tokens=asked)], [Budget(30, 30)])[0]
            assert len(draft) == asked


@pytest.mark.parametrize("wrong", [{"min_match": 0}, {"min_match": 6}, {"num_tokens": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="min|num_tokens"):
        NgramDrafter(**wrong)
    with pytest.raises(ValueError, match="capacity"):
        SuffixDrafter(capacity=-1)
