"""The semantic id index: ids, rows and codes lead to each other, at a million items too."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from recserve.features.catalog.catalog import Catalog, item_key, item_keys
from recserve.features.catalog.semantic_ids import SemanticIds, build_semantic_ids
from recserve.features.tables.items import ItemTable
from recserve.kernels.trie.trie import build_trie


def codes_of(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, dtype=np.uint16)


CODES = codes_of([[1, 2], [0, 3], [1, 2], [0, 0], [1, 2]])
IDS = ["a", "b", "c", "d", "e"]


def test_collisions_get_a_level_by_popularity_then_row() -> None:
    popularity = np.array([1, 0, 5, 0, 1], np.float32)
    index, report = build_semantic_ids(IDS, CODES, (2, 4), popularity)
    assert index.has_disambiguation and index.codebook_sizes == (2, 4, 3)
    assert index.codes[:, 2].tolist() == [1, 0, 0, 0, 2]
    assert report.collision_share == pytest.approx(0.6) and report.largest_collision == 3
    assert report.used == (1.0, 0.75)
    assert report.perplexity[0] == pytest.approx(np.exp(-(0.6 * np.log(0.6) + 0.4 * np.log(0.4))))
    assert "60.0% of the items" in report.lines()[0]


def test_no_collisions_no_level() -> None:
    index, report = build_semantic_ids(IDS[:3], codes_of([[1], [0], [2]]), (3,), np.zeros(3))
    assert not index.has_disambiguation and index.codebook_sizes == (3,)
    assert report.collision_share == 0 and report.largest_collision == 1


@pytest.mark.parametrize("largest", [1, 2, 3, 9])
def test_a_level_is_there_from_the_first_collision_on(largest: int) -> None:
    """The largest group of equal codes may have any size; the others are smaller."""
    sizes = range(1, largest + 1)
    codes = codes_of([[0, n] for n in sizes for _ in range(n)])
    ids = [f"i{n}" for n in range(len(codes))]
    index, report = build_semantic_ids(ids, codes, (1, 10), np.zeros(len(ids)))
    assert report.largest_collision == largest
    assert index.has_disambiguation == (largest > 1) == (len(index.codebook_sizes) == 3)
    assert len(np.unique(index.codes, axis=0)) == len(ids)
    for code in sizes:
        rows = index.decode(np.array([[0, code]]))[0]
        assert codes[rows].tolist() == [[0, code]] * code


def test_decode_with_and_without_the_disambiguation_level() -> None:
    index, _ = build_semantic_ids(IDS, CODES, (2, 4), np.array([1, 0, 5, 0, 1]))
    full = index.decode(index.codes)
    assert full.rows.tolist() == [0, 1, 2, 3, 4] and full.offsets.tolist() == [0, 1, 2, 3, 4, 5]
    some = index.decode(np.array([[1, 2, 7], [9, 9, 9], [0, 3, 0]]))
    assert [some[i].tolist() for i in range(3)] == [[], [], [1]]
    decoded = index.decode(np.array([[1, 2], [0, 3], [1, 3]]))
    assert [decoded[i].tolist() for i in range(len(decoded))] == [[2, 0, 4], [1], []]
    assert index.decode(np.array([[0]]))[0].tolist() == [3, 1]
    assert len(index.decode(np.empty((0, 3), np.int64))) == 0
    with pytest.raises(ValueError, match="expected .n, 1..3."):
        index.decode(np.zeros((1, 4), np.int64))


@pytest.mark.parametrize(
    ("ids", "codes", "sizes", "message"),
    [
        (["a"], codes_of([[0], [1]]), (2,), "1 item ids but codes of 2"),
        (["a", "b"], codes_of([[0], [1]]), (2, 2), "codes have 1 levels; 2 codebook sizes"),
        (["a", "b"], codes_of([[0], [2]]), (2,), "a code of level 0 is 2; the codebook holds 2"),
        (["a", "b"], codes_of([[1], [1]]), (2,), "items 'a' and 'b' share a semantic id"),
        (["a", "b"], np.zeros((2, 1), np.int64), (2,), "expected uint16"),
        ([], np.zeros((0, 1), np.uint16), (2,), "expected uint16"),
    ],
)
def test_refuses(ids: list[str], codes: np.ndarray, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SemanticIds(ids, codes, sizes, False)


def test_agrees_with_the_trie_on_drawn_codes() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 5, size=(400, 3)).astype(np.uint16)
    index, _ = build_semantic_ids([f"i{n}" for n in range(400)], codes, (5, 5, 5), rng.random(400))
    trie = build_trie(torch.from_numpy(index.codes.astype(np.int64)), index.codebook_sizes)
    assert trie.leaf_items.tolist() == index.order.tolist()
    for prefix in codes[:20]:
        under = np.flatnonzero((codes == prefix).all(axis=1))
        assert sorted(index.decode(prefix[None])[0].tolist()) == under.tolist()


@pytest.mark.slow
def test_a_million_items_fit_in_100_mb() -> None:
    """Index and trie together, counted in bytes."""
    rng = np.random.default_rng(0)
    items = 1_000_000
    codes = rng.integers(0, 256, size=(items, 4)).astype(np.uint16)
    ids = [str(n) for n in range(items)]
    index, _ = build_semantic_ids(ids, codes, (256,) * 4, rng.random(items))
    trie = build_trie(torch.from_numpy(index.codes.astype(np.int64)), index.codebook_sizes)
    rows = rng.integers(0, items, size=1000)
    assert np.array_equal(index.decode(index.codes[rows]).rows, rows)
    tensors = [value for value in vars(trie).values() if isinstance(value, torch.Tensor)]
    assert index.codes.nbytes + index.order.nbytes + sum(t.nbytes for t in tensors) < 100_000_000


def catalog(ids: list[str]) -> Catalog:
    items = ItemTable(ids, [""] * len(ids), [[] for _ in ids], pa.table({}))
    popularity = np.arange(len(ids), dtype=np.float32)
    codes = np.arange(len(ids), dtype=np.uint16)[:, None]
    index, _ = build_semantic_ids(ids, codes, (len(ids),), popularity)
    return Catalog("v", items, index, popularity, np.zeros((len(ids), 2), np.float32))


def test_item_keys_lead_to_rows_in_any_process() -> None:
    made = catalog(["a", "b", "c"])
    assert item_key("a") == 0x2F42_665B_399E_F840
    keys = np.append(item_keys(["c", "a"]), np.uint64(1))
    assert made.rows_of_keys(keys).tolist() == [2, 0, -1]


def test_colliding_item_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recserve.features.catalog.catalog.item_key", lambda item_id: len(item_id))
    with pytest.raises(ValueError, match="items 'a' and 'b' have the same 64-bit key"):
        catalog(["a", "b"])


def test_catalogue_refuses_parts_of_unequal_size() -> None:
    made = catalog(["a", "b"])
    with pytest.raises(ValueError, match="parts differ in size"):
        Catalog("v", made.items, made.semantic_ids, made.popularity[:1], made.vectors)
