"""Lookups in C against the plain ones: the same drafts, node by node."""

import random

import pytest

from recserve.kernels import dispatch
from recserve.kernels.cpu import native
from recserve.kernels.cpu.native_lookup import FIRST_SLOTS, NativeIndex
from recserve.speculation.drafters.lookup import ANCHORS, Ask, SuffixLimits
from recserve.speculation.drafters.plain_lookup import PlainLookup
from recserve.speculation.drafters.text_index import GAP
from recserve.speculation.drafters.text_lookup import NativeLookup, text_lookup
from tests.support.grids import covering
from tests.support.token_paths import drawn_text

in_c = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
LIMITS = {
    "own": SuffixLimits(),
    "few": SuffixLimits(occurrences=3),
    "deep": SuffixLimits(60, 30, 40, 2.3, 0.5, 0.02),
    "short": SuffixLimits(8, 4, 5, 0.3, 0.0, 0.4, occurrences=5),
}


def repeated(seed: int, length: int, vocabulary: int) -> list[int]:
    """A period with a few wrong tokens in it."""
    rng = random.Random(seed)
    period = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 9))]
    text = (period * length)[:length]
    for _ in range(length // 40):
        text[rng.randrange(length)] = rng.randrange(vocabulary)
    return text


STREAMS = {
    "repeats": lambda seed: drawn_text(seed, 700, 4),
    "words": lambda seed: drawn_text(seed, 700, 60),
    "random": lambda seed: random.Random(seed).choices(range(3), k=500),
    "period": lambda seed: repeated(seed, 700, 9),
    "one": lambda seed: [5] * 400,
}


def drawn_ask(rng: random.Random, id: int, tokens: list[int]) -> Ask:
    """What a step may ask of a text."""
    nodes = rng.choice([0, 1, 6, 24, 60])
    depth = min(nodes, rng.choice([0, 1, 5, 16, 30]))
    return Ask(id, tokens, nodes, depth, rng.choice([1, 1, 2, 3]))


def equal(one, other) -> bool:
    """The same nodes in the same order."""
    columns = (one.tokens.tolist(), one.parents.tolist(), one.depth)
    return columns == (other.tokens.tolist(), other.parents.tolist(), other.depth)


@in_c
@pytest.mark.parametrize("stream,lengths", covering(tuple(STREAMS), ((2, 3, 4, 5), (1,), ANCHORS)))
def test_ngrams_are_those_of_the_plain_lookup(stream, lengths):
    """Three texts side by side that grow by drawn numbers of tokens."""
    rng, found = random.Random(0), 0
    texts = [STREAMS[stream](seed) for seed in range(3)]
    plain, fast = PlainLookup(lengths), NativeLookup(lengths)
    stops = [1, 7, 300]
    while min(stops) < 400:
        asks = [drawn_ask(rng, n, t[:s]) for n, (t, s) in enumerate(zip(texts, stops, strict=True))]
        for one, other in zip(fast.ngrams(asks), plain.ngrams(asks), strict=True):
            assert equal(one, other)
            found += len(one) > 0
        stops = [stop + rng.randrange(6) for stop in stops]
    assert found > 50


@in_c
@pytest.mark.parametrize(
    "stream,limits,capacity", covering(tuple(STREAMS), tuple(LIMITS), (0, 5, 100, 3000), pairs=True)
)
def test_suffixes_are_those_of_the_plain_lookup(stream, limits, capacity):
    """Texts come, grow and leave their output to the store, which drops its oldest tokens."""
    rng, found, forks = random.Random(1), 0, 0
    how = ANCHORS, capacity, LIMITS[limits]
    plain, fast = PlainLookup(*how), NativeLookup(*how)
    running: dict[int, tuple[list[int], int]] = {}
    for step in range(80):
        if len(running) < 3:
            running[step] = STREAMS[stream](step), rng.randrange(1, 60)
        asks = [drawn_ask(rng, id, text[:stop]) for id, (text, stop) in running.items()]
        for one, other in zip(fast.suffixes(asks), plain.suffixes(asks), strict=True):
            assert equal(one, other)
            found += len(one) > 0
            forks += len(one) > one.depth
        running = {id: (text, stop + rng.randrange(8)) for id, (text, stop) in running.items()}
        if rng.random() < 0.1:
            id, (text, stop) = running.popitem()
            for lookup in (plain, fast):
                lookup.forget(id)
                lookup.store(text[:stop])
    assert found > 30
    assert forks or stream == "one" or limits == "short"


@in_c
def test_an_index_that_forgets_keeps_its_memory_and_one_that_does_not_doubles():
    ring, grown = NativeIndex((1, 2), 100), NativeIndex((1, 2))
    size = ring.size
    assert size == 128
    for number in range(40):
        ring.extend([number] * 30)
        grown.extend([number] * 30)
        assert ring.size == size and ring.stop - ring.start == min(30 * (number + 1), 100)
        assert FIRST_SLOTS <= grown.size <= max(FIRST_SLOTS, 2 * grown.stop)
    assert grown.start == 0 and grown.stop == ring.stop == 1200


def test_a_short_store_behind_gaps():
    """What crosses the end of an output is no match, and nothing follows there."""
    how = ANCHORS, 16, SuffixLimits(factor=4.0)
    for lookup in (PlainLookup(*how), text_lookup(*how)):
        lookup.store([1, 2, 3])
        lookup.store([4, 5])
        asks = [Ask(0, [9, 1, 2], 4, 4, 4), Ask(1, [9, 2, 3], 4, 4, 4), Ask(2, [3, 4], 4, 4, 4)]
        drafts = lookup.suffixes(asks)
        assert [draft.tokens.tolist() for draft in drafts] == [[3], [], [5]]
    assert GAP < 0


def test_without_c_the_lookup_is_the_plain_one(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", "torch")
    assert isinstance(text_lookup(ANCHORS), PlainLookup)
    monkeypatch.setattr(dispatch, "KERNELS", "auto")
    monkeypatch.setattr(native, "library", lambda: None)
    assert isinstance(text_lookup(ANCHORS), PlainLookup)


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.5])
def test_shares_that_let_in_what_never_followed_are_refused(wrong):
    with pytest.raises(ValueError, match="min_prob is"):
        SuffixLimits(min_prob=wrong)
