"""Filters of several requests as one bitmap over the leaves of a catalogue without later items."""

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems, packed_rows
from recserve.kernels.trie.trie import build_trie
from recserve.search.filters import RequestFilters, leaf_filter

ITEMS = 70  # three words of bits
CODES = torch.stack([torch.arange(ITEMS) % 7, torch.arange(ITEMS) // 7], dim=1)
TRIE = build_trie(CODES, (7, 10))


def leaves_of(words: torch.Tensor) -> np.ndarray:
    """Returns [B, I] bool from [B, words] int32."""
    raw = words.numpy().astype("<i4").view(np.uint8)
    return np.unpackbits(raw, axis=1, count=ITEMS, bitorder="little").astype(bool)


@pytest.mark.parametrize("seed", range(3))
def test_the_bits_are_the_items_that_each_request_may_get(seed):
    draw = np.random.default_rng(seed)
    chosen = [None, draw.random(ITEMS) < 0.5, np.zeros(ITEMS, bool), draw.random(ITEMS) < 0.5]
    excluded = [draw.integers(0, ITEMS, 9), None, None, draw.integers(0, ITEMS, 9)]
    filters, expected = [None], [np.ones(ITEMS, bool)]
    for allowed, rows in zip(chosen, excluded, strict=True):
        items = None if allowed is None else AllowedItems(packed_rows(allowed), ITEMS)
        filters.append(leaf_filter(TRIE, rows, items))
        left = np.ones(ITEMS, bool) if allowed is None else allowed.copy()
        if rows is not None:
            left[rows] = False
        expected.append(left)
    together = RequestFilters(TRIE, tuple(filters)).in_bits()
    assert together.added is None, "no item came later"
    found = leaves_of(together.bits.words)
    rows_of_leaves = TRIE.leaf_rows.numpy()
    for bits, left in zip(found, expected, strict=True):
        assert bits.tolist() == left[rows_of_leaves].tolist()
