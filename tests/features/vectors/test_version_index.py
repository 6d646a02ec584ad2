"""The index of a live catalogue against a plain list of vectors: changes, folds, what they cost."""

import tracemalloc

import numpy as np
import pytest

from recserve.features.tables.arrays import are_among
from recserve.features.vectors.vector_index import FaissIndex, VersionIndex
from tests.support.grids import covering

DIM = 8


def unit(count: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


VECTORS, QUERIES = unit(3000, 0), unit(7, 1)


def vectors_of(rows: np.ndarray) -> np.ndarray:
    return VECTORS[rows]


def nearest_live(index: VersionIndex, live: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """As a reader does it: everything is searched, what is gone is dropped."""
    rows, scores = index.search(QUERIES, index.num_items)
    kept = are_among(rows, live)
    assert (kept.sum(1) == live.size).all()  # every row once
    places = np.argsort(~kept, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(rows, places, 1), np.take_along_axis(scores, places, 1)


def check(index: VersionIndex, num_rows: int, gone: np.ndarray) -> None:
    """It finds what comparing with every live row finds."""
    live = np.setdiff1d(np.arange(num_rows), gone)
    assert index.num_rows == num_rows and live.size <= index.num_items <= num_rows
    k = min(live.size, 20)
    exact = QUERIES @ VECTORS[live].T
    best = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    rows, scores = nearest_live(index, live, k)
    np.testing.assert_array_equal(rows, live[best])
    np.testing.assert_allclose(scores, np.take_along_axis(exact, best, 1), atol=1e-6)
    np.testing.assert_array_equal(index.vectors(live[::-1]), VECTORS[live[::-1]])


@pytest.mark.parametrize(
    "seed,flat_below", covering(range(4), {"lists": 60, "lists-later": 200, "flat": 5000})
)
def test_through_changes_and_folds_it_finds_what_sorting_finds(seed, flat_below):
    """Rows come, go and come back; now and then a fold; earlier versions stay what they were."""
    draw = np.random.default_rng(seed)
    num_rows, gone = 100, np.zeros(0, np.int64)
    index = VersionIndex.on(FaissIndex(VECTORS[:num_rows], flat_below))
    versions = []
    for step in range(40):
        back = draw.random(gone.size) < 0.2
        num_rows += int(draw.integers(0, 20))
        leaving = draw.integers(0, num_rows, int(draw.integers(0, 12)))
        gone = np.union1d(gone[~back], leaving)
        index = index.at(num_rows, gone, vectors_of)
        check(index, num_rows, gone)
        versions.append((index, num_rows, gone))
        if step % 7 == 6:
            index = index.fold(gone, vectors_of)
            assert not index.num_later and index.num_items == num_rows - gone.size
            check(index, num_rows, gone)
    for version in versions:
        check(*version)
    assert (index.base.num_lists > 0) == (flat_below < 5000)


def test_a_fold_keeps_the_lists_until_most_rows_came_after_them():
    index = VersionIndex.on(FaissIndex(VECTORS[:400], 100))
    lists, none = index.base.num_lists, np.zeros(0, np.int64)
    for stop in (500, 700, 800):
        index = index.at(stop, none, vectors_of).fold(none, vectors_of)
        assert index.base.num_lists == lists
    index = index.at(801, none, vectors_of).fold(none, vectors_of)
    assert index.base.num_lists == round(4 * 801**0.5) > lists
    check(index, 801, none)


def test_everything_may_go_and_come_back():
    none = np.zeros(0, np.int64)
    index = VersionIndex.on(FaissIndex(VECTORS[:50])).at(60, none, vectors_of)
    everything = np.arange(60)
    empty = index.at(60, everything, vectors_of).fold(everything, vectors_of)
    assert empty.num_items == 0
    assert (empty.search(QUERIES, 3)[0] == -1).all()
    check(empty.at(60, everything[5:], vectors_of), 60, everything[5:])


def test_a_change_set_copies_its_own_rows_and_not_the_later_ones():
    """Bytes that sets of 20 rows allocate: most as many as the first, all together few copies."""
    none = np.zeros(0, np.int64)
    index = VersionIndex.on(FaissIndex(VECTORS[:100]))
    allocated = []
    tracemalloc.start()
    try:
        for num_rows in range(120, 3000, 20):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            index = index.at(num_rows, none, vectors_of)
            allocated.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert index.num_later == num_rows - 100
    one_set, all_sets = 20 * (4 * DIM + 8), index.num_later * (4 * DIM + 8)
    assert max(np.median(allocated[:20]), np.median(allocated[-20:])) < 4 * one_set + 2000
    assert sum(allocated) < 6 * all_sets + len(allocated) * 2000
