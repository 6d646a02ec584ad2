"""Item vectors: text near text, together near together, the user's own as they are."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import BadRows, SchemaError
from recserve.features.vectors.text_encoder import TextEncoder, document, unit
from recserve.features.vectors.vectors import (
    collaborative_vectors,
    fit_text_encoder,
    join_vectors,
    read_vectors,
)

TITLES = ["red pan", "blue pan", "garden hose", "green hose", ""]
PATHS = [["Home > Kitchen"], ["Home > Kitchen"], ["Home > Garden"], ["Home > Garden"], []]
ITEMS = ItemTable(list("abcde"), TITLES, PATHS, pa.table({"keywords": ["x", "x", "y", "y", None]}))


def log(histories: list[list[int]]) -> EventLog:
    rows = np.array([row for history in histories for row in history], dtype=np.int32)
    offsets = np.cumsum([0] + [len(history) for history in histories]).astype(np.int64)
    zeros = np.zeros(rows.size, dtype=np.int16)
    names = [f"u{n}" for n in range(len(histories))]
    ones = np.ones(rows.size, np.float32)
    return EventLog(names, offsets, rows, np.arange(rows.size), zeros, ("event",), ones, False)


def test_text_vectors_are_near_where_words_are_shared() -> None:
    vectors = fit_text_encoder(ITEMS, 4, seed=0).encode(ITEMS)
    assert vectors.shape == (5, 4) and vectors.dtype == np.float32
    near = vectors @ vectors.T
    assert near[0, 1] > near[0, 2] + 0.3 and near[2, 3] > near[1, 3] + 0.3
    assert np.allclose(np.linalg.norm(vectors[:4], axis=1), 1, atol=1e-5)
    assert not vectors[4].any()
    assert np.array_equal(vectors, fit_text_encoder(ITEMS, 4, seed=0).encode(ITEMS))


def test_categories_and_keywords_count() -> None:
    titles = ["", "", "", ""]
    table = pa.table({"keywords": pa.array([["oak"], ["oak"], [], []], pa.list_(pa.string()))})
    items = ItemTable(list("abcd"), titles, [[], [], ["X > Y"], ["X > Y"]], table)
    near = fit_text_encoder(items, 3, seed=0).encode(items)
    near = near @ near.T
    assert near[0, 1] > 0.99 and near[2, 3] > 0.99 and abs(near[0, 2]) < 0.01


def test_more_dimensions_than_terms_are_zero() -> None:
    vectors = fit_text_encoder(ITEMS, 64, seed=0).encode(ITEMS)
    assert vectors.shape == (5, 64) and not vectors[:, 10:].any()
    nothing = ItemTable(["a"], [""], [[]], pa.table({}))
    assert not fit_text_encoder(nothing, 8, seed=0).encode(nothing).any()


def test_saved_encoder_gives_new_items_the_same_space(tmp_path: Path) -> None:
    encoder = fit_text_encoder(ITEMS, 4, seed=0)
    encoder.save(tmp_path)
    loaded = TextEncoder.load(tmp_path)
    assert np.array_equal(loaded.encode(ITEMS), encoder.encode(ITEMS))
    new = ItemTable(["n"], ["red unheard pan"], [["Home > Kitchen"]], pa.table({}))
    assert (loaded.encode(new) @ loaded.encode(ITEMS).T)[0].argmax() in (0, 1)
    (tmp_path / "terms.json").write_text('["only one"]')
    with pytest.raises(ValueError, match="do not fit"):
        TextEncoder.load(tmp_path)
    (tmp_path / "text.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a text encoder"):
        TextEncoder.load(tmp_path)


def test_an_encoder_computes_what_scikit_learn_does() -> None:
    """To the bit: vectors of new items are made without it, those of a build were made with it."""
    titles = ["Red red pan, RED!", "the pan of the garden", "Garten-Öl 5x", "nothing known", ""]
    paths = [["Home > Kitchen", "Home > Big pans"], [], ["Home > Garden"], [], []]
    rows = [ITEMS, ItemTable(list("abcde"), titles, paths, pa.table({}))]
    encoder = fit_text_encoder(ITEMS, 4, seed=0)
    reference = TfidfVectorizer(
        sublinear_tf=True,
        lowercase=False,
        token_pattern=r"[^\W_]{2,}|c:\S+",  # of Latin text
        vocabulary=list(encoder.terms),
    )
    reference.idf_ = encoder.idf.astype(np.float64)
    for items in rows:
        texts = [document(items, row).lower() for row in range(len(items))]
        weights = reference.transform(texts)
        expected = unit(np.asarray(weights @ encoder.components, dtype=np.float32))
        assert np.array_equal(encoder.encode(items), expected)


def test_collaborative_vectors_are_near_where_items_meet() -> None:
    histories = [[0, 1, 2, 3], [3, 1, 0, 2], [4, 5, 6, 7], [6, 4, 7, 5]]
    vectors = collaborative_vectors(log(histories), 9, 4, seed=0)
    near = vectors @ vectors.T
    assert near[:4, :4].mean() > near[:4, 4:8].mean() + 0.3
    assert near[4:8, 4:8].mean() > near[:4, 4:8].mean() + 0.3
    assert not vectors[8].any()


def test_collaborative_vectors_do_not_cross_users() -> None:
    together = collaborative_vectors(log([[0, 1], [2, 3]]), 4, 4, seed=0)
    assert abs(together[1] @ together[2]) < 1e-3
    assert not collaborative_vectors(log([[0], [1]]), 4, 4, seed=0).any()


def test_join_weighs_the_second_part() -> None:
    joined = join_vectors(np.array([[1.0, 0]]), np.array([[0, 1.0]]), weight=0.5)
    assert np.allclose(joined, np.array([[1, 0, 0, 0.5]]) / np.sqrt(1.25))
    assert not unit(np.zeros((1, 3))).any()


def test_reads_npy_by_file_row(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    np.save(path, np.arange(6.0).reshape(3, 2))
    assert read_vectors(path, ["a", "b", "c"]).tolist() == [[0, 1], [2, 3], [4, 5]]
    report = BadRows("items.parquet", 3, np.array([0, 2]))
    assert read_vectors(path, ["a", "c"], report).tolist() == [[0, 1], [4, 5]]
    with pytest.raises(ValueError, match="3 vectors; expected 2"):
        read_vectors(path, ["a", "b"])


def test_refuses_npy_of_another_shape_or_with_objects(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    for array in (np.zeros(3), np.zeros((3, 2), np.int64), np.zeros((3, 0))):
        np.save(path, array)
        with pytest.raises(SchemaError, match="expected floats"):
            read_vectors(path, ["a", "b", "c"])
    np.save(path, np.array([object()]), allow_pickle=True)
    with pytest.raises(SchemaError, match="not a readable"):
        read_vectors(path, ["a"])
    np.save(path, np.array([[1.0], [np.nan]]))
    with pytest.raises(ValueError, match="item 'b' is not finite"):
        read_vectors(path, ["a", "b"])


def test_reads_parquet_by_id(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    pq.write_table(pa.table({"item_id": ["b", "x", "a"], "vector": [[1.0], [2.0], [3.0]]}), path)
    assert read_vectors(path, ["a", "b"]).tolist() == [[3], [1]]
    with pytest.raises(ValueError, match="no vector for item 'q' .1 are missing"):
        read_vectors(path, ["a", "q"])
    pq.write_table(pa.table({"item_id": ["b", "a"], "vector": [[1.0], [2.0, 3.0]]}), path)
    with pytest.raises(SchemaError, match="column vector has lengths"):
        read_vectors(path, ["a", "b"])
    pq.write_table(pa.table({"item_id": ["b"], "vector": ["x"]}), path)
    with pytest.raises(SchemaError, match="column vector is string; expected list<float>"):
        read_vectors(path, ["b"])
