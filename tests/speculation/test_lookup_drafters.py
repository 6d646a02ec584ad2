"""Lookup drafters against plain searches through the text."""

import random
from collections import Counter

import pytest

from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.shared.token_string import GAP, to_string
from recserve.drafters.suffix.drafter import ANCHORS, SuffixDrafter, SuffixLimits
from recserve.drafters.suffix.output_store import OutputStore
from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.text_loop import check_draft
from tests.support.token_paths import drawn_text, paths


def context(tokens, id=0, num_prompt=None, rule="sample", num_tokens=None) -> TextContext:
    speculation = Speculation("test", rule, num_tokens)
    return TextContext(
        id, tokens, len(tokens) if num_prompt is None else num_prompt, SamplingParams(), speculation
    )


@pytest.mark.parametrize("capacity", [60, 400, 10_000])
def test_the_store_finds_what_a_search_of_its_outputs_finds(capacity):
    """Newest first, within one output, and only among the outputs that it still has."""
    lengths = (1, 2, 4)
    store, outputs = OutputStore(capacity, lengths), []
    for number in range(40):
        output = to_string(drawn_text(number, 5 + number % 23, 5))
        store.add(output)
        outputs.append(output)
        assert len(store) <= capacity
        everything = GAP.join(outputs) + GAP
        known = everything[len(everything) - len(store) :]
        for length in lengths:
            ngram = output[-length:]
            found = [text[end - length : end + 3] for text, end in store.ends(ngram)]
            found = [text.partition(GAP)[0] for text in found]
            starts = [i for i in range(len(known)) if known.startswith(ngram, i)]
            texts = [known[i : i + length + 3].partition(GAP)[0] for i in reversed(starts)]
            assert found == texts


def test_a_store_takes_the_end_of_an_output_that_is_too_long():
    store = OutputStore(16, (1,))
    store.add(to_string(range(100)))
    assert len(store) == 8 and not list(store.ends(chr(92)))
    assert [text[end - 1 : end + 1] for text, end in store.ends(chr(93))] == [chr(93) + chr(94)]


def test_nothing_follows_the_end_of_an_output():
    drafter = SuffixDrafter(limits=SuffixLimits(factor=4.0), capacity=32)
    for number, output in enumerate(([1, 2, 3], [4, 5])):
        drafter.propose([context([0, *output], number, 1)], [Budget(4, 4)])
        drafter.forget(number)
    texts = [context([9, 1, 2], 7), context([9, 2, 3], 8), context([3, 4], 9)]
    drafts = drafter.propose(texts, [Budget(4, 4)] * 3)
    assert [draft.tokens.tolist() for draft in drafts] == [[3], [], [5]]


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.5])
def test_shares_that_let_in_what_never_followed_are_refused(wrong):
    with pytest.raises(ValueError, match="min_prob is"):
        SuffixLimits(min_prob=wrong)


def plain_continuation(text, end, depth) -> list[int]:
    grown = list(text)
    for i in range(depth):
        grown.append(grown[end + 1 + i])
    return grown[len(text) :]


def plain_ngram(text, low, high, depth) -> list[int]:
    """The continuation of the newest occurrence of the longest match."""
    for n in range(high, low - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if len(text) >= n and text[end - n + 1 : end + 1] == text[-n:]:
                return plain_continuation(text, end, depth)
    return []


@pytest.mark.parametrize("vocabulary", [1, 2, 4, 20])
def test_ngram_drafts_what_a_search_finds(vocabulary):
    drafter = NgramDrafter(min_match=1, max_match=4, num_tokens=6)
    text = drawn_text(vocabulary, 160, vocabulary)
    rng = random.Random(1)
    stop = 1
    while stop < len(text):
        budget = Budget(rng.randrange(0, 20), rng.randrange(0, 9))
        draft = drafter.propose([context(text[:stop])], [budget])[0]
        check_draft(draft, budget, vocabulary)
        depth = min(budget.depth, budget.num_nodes, 6)
        assert draft.tokens.tolist() == plain_ngram(text[:stop], 1, 4, depth)
        stop += rng.randrange(1, 4)


def test_a_period_is_drafted_past_the_end_of_the_text():
    draft = NgramDrafter(num_tokens=7).propose([context([1, 2, 3] * 2)], [Budget(7, 7)])[0]
    assert draft.tokens.tolist() == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("drafter", [NgramDrafter(), SuffixDrafter()])
def test_tokens_of_any_vocabulary_are_drafted(drafter):
    """Also those whose characters are surrogates or lie outside Unicode's first plane."""
    tokens = [0, 0xD800, 0xDC00, 0xFFFF, 262_143, 1_000_000] * 2
    draft = drafter.propose([context(tokens)], [Budget(4, 4)])[0]
    assert draft.tokens.tolist() == tokens[:4]


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
def test_suffix_drafts_the_likeliest_tree_of_all_match_lengths(vocabulary):
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


def test_suffix_chain_follows_the_most_frequent_child():
    tokens = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3, 7, 1, 2]
    drafter = SuffixDrafter(limits=SuffixLimits(factor=4.0, min_prob=0.01), capacity=0)
    tree = drafter.propose([context(tokens)], [Budget(32, 4)])[0]
    assert (3,) in paths(tree) and (4,) in paths(tree)
    chain = drafter.propose([context(tokens, rule="rejection")], [Budget(32, 4)])[0]
    assert chain.tokens.tolist() == [3, 7, 1, 2]


def test_long_matches_are_found_behind_many_short_ones():
    """The long match is older than more occurrences of its last token than are looked at."""
    rare = [11, 12, 13, 14, 15, 16, 17, 5]
    tokens = [*rare, 99, *([5, 6, 7] * 200), *rare]
    limits = SuffixLimits(occurrences=16)
    draft = SuffixDrafter(limits=limits, capacity=0).propose([context(tokens)], [Budget(8, 8)])[0]
    assert draft.tokens.tolist()[:1] == [99]
    assert max(ANCHORS) <= len(rare)


def test_the_store_forgets_its_oldest_and_keeps_its_bound():
    drafter = SuffixDrafter(capacity=128)
    for number in range(50):
        drafter.propose([context([1, *range(100, 140)], number, 1)], [Budget(4, 4)])
        drafter.forget(number)
        assert len(drafter._store) <= 128
    assert not len(drafter._texts) and not drafter._contexts
    found = drafter.propose([context([120, 121], 99)], [Budget(3, 3)])[0]
    assert found.tokens.tolist()[0] == 122


def test_request_asks_for_fewer_or_no_tokens():
    tokens = [1, 2, 3] * 6
    for drafter in (NgramDrafter(), SuffixDrafter()):
        for asked in (0, 1, 2):
            draft = drafter.propose([context(tokens, num_tokens=asked)], [Budget(30, 30)])[0]
            assert len(draft) == asked


@pytest.mark.parametrize("wrong", [{"min_match": 0}, {"min_match": 6}, {"num_tokens": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="min|num_tokens"):
        NgramDrafter(**wrong)
    with pytest.raises(ValueError, match="capacity"):
        SuffixDrafter(capacity=-1)


def ended(drafter, id, output, salt):
    """Lets a sequence write an output and end."""
    sequence = context([0, *output], id, 1)
    sequence.salt = salt
    drafter.propose([sequence], [Budget(4, 4)])
    drafter.forget(id)


def drafted(drafter, tokens, salt):
    sequence = context(tokens, 99)
    sequence.salt = salt
    (draft,) = drafter.propose([sequence], [Budget(24, 24)])
    drafter._contexts.clear()  # it goes on: nothing of it enters the store
    drafter._texts.forget(99)
    return paths(draft)


@pytest.mark.parametrize("capacity", [200, 2**17])
def test_an_output_is_proposed_to_sequences_with_its_own_salt_only(capacity):
    """Each salt drafts what a fresh drafter with this salt's outputs drafts."""
    salts = (b"", b"a" * 16, b"\xff" * 16)
    drafter, alone = SuffixDrafter(capacity=capacity), {s: SuffixDrafter() for s in salts}
    num_drafted = 0
    for number in range(12):
        salt, output = salts[number % 3], drawn_text(number, 12, 6)
        ended(drafter, number, output, salt)
        ended(alone[salt], number, output, salt)
        for other in salts:
            for stop in (4, 8, 11):
                expected = drafted(alone[other], output[:stop], other)
                assert drafted(drafter, output[:stop], other) == expected
                num_drafted += bool(expected)
    assert num_drafted > 20
    secret = list(range(500, 520))
    ended(drafter, 50, secret, salts[1])
    assert drafted(drafter, secret[:4], salts[1])[0] == tuple(secret[4:5])
    assert drafted(drafter, secret[:4], salts[2]) == drafted(drafter, secret[:4], b"") == []


def test_all_salts_together_keep_the_bound_of_the_store():
    drafter = SuffixDrafter(capacity=128)
    for number in range(50):
        ended(drafter, number, range(100, 140), number.to_bytes(16))
        assert len(drafter._store) <= 128
        assert all(len(s.text) == len(s._salts) for s in drafter._store._segments)


def test_the_search_for_one_salt_does_not_walk_through_the_outputs_of_another():
    """Otherwise its time would tell how often another client's outputs have these tokens."""
    store = OutputStore(10_000, (1,))
    store.add("x" * 4000, b"one")
    segment = store._segments[0]
    visited = []

    class Counted(list):
        def __getitem__(self, index):
            visited.append(index)
            return list.__getitem__(self, index)

    segment._salts = Counted(segment._salts)
    counts = []
    for other in (b"two", b"three", b"four"):  # one of them may share the bucket by chance
        assert not list(store.ends("x", other))
        counts.append(len(visited))
        visited.clear()
    assert min(counts) == 0
    assert len(list(store.ends("x", b"one"))) == 4000
