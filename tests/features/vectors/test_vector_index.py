"""Nearest items against all inner products."""

import numpy as np
import pytest

from recserve.features.vectors.vector_index import FaissIndex


def unit(count: int, dimensions: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, dimensions)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.mark.parametrize(("items", "k"), [(1, 1), (63, 63), (781, 20)])
def test_flat_finds_what_sorting_finds(items, k):
    vectors, queries = unit(items, 24, 0), unit(5, 24, 1)
    rows, scores = FaissIndex(vectors).search(queries, k)
    exact = queries @ vectors.T
    best = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(rows, best)
    np.testing.assert_allclose(scores, np.take_along_axis(exact, best, 1), atol=1e-6)


def clustered(count: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    near = unit(50, 24, 7)[draw.integers(0, 50, count)] + 0.5 * unit(count, 24, seed)
    return near / np.linalg.norm(near, axis=1, keepdims=True)


def test_inverted_lists_find_nearly_all_and_everything_on_demand():
    vectors, queries = clustered(6000, 2), clustered(40, 3)
    index = FaissIndex(vectors, flat_below=1000)
    assert index.num_lists > 100
    flat, exact = FaissIndex(vectors).search(queries, 10)
    rows, scores = index.search(queries, 10)
    found = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows, flat, strict=True)])
    assert found > 0.8
    assert (np.diff(scores, axis=1) <= 0).all() and (scores[:, 0] <= exact[:, 0] + 1e-6).all()
    everything, _ = index.search(queries, 6000)
    assert all(np.array_equal(np.sort(row), np.arange(6000)) for row in everything)


def test_no_vectors_are_refused():
    with pytest.raises(ValueError, match=r"\(0, 8\)"):
        FaissIndex(np.zeros((0, 8), np.float32))
