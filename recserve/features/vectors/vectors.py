"""Item vectors, from text, from co-occurrence in histories, or from the user's own file.

- Text: TF-IDF over title, category path and keywords, then truncated SVD.
- Collaborative: positive pointwise mutual information of items near each other in training
  histories, then truncated SVD. Skip-gram factorises the same matrix (Levy and Goldberg 2014).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.utils.extmath import randomized_svd

from recserve.features.tables.column_names import names_of_table
from recserve.features.tables.conversions import id_column
from recserve.features.tables.events import EventLog
from recserve.features.tables.input_table import InputTable
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import BadRows, SchemaError, column
from recserve.features.vectors.text_encoder import TextEncoder, document, unit
from recserve.features.words import words

VECTORS = ("item_id", "vector")  # columns of a file of vectors
MAX_TERMS = 50_000
WINDOW = 10
MAX_PAIR_EVENTS = 16_000_000  # whose pairs are counted; of more events, those of some users
RANGE_EVENTS = 1 << 21  # of the items whose pairs are counted at once


def fit_text_encoder(items: ItemTable, dim: int, seed: int) -> TextEncoder:
    """Fits an encoder on all items; columns beyond the rank of the text are zero.

    Args:
        items: Items whose text is used.
        dim: Columns of the projection.
        seed: Seed of the randomised SVD.
    """
    documents = [document(items, row) for row in range(len(items))]
    model = TfidfVectorizer(
        sublinear_tf=True,
        stop_words="english",
        lowercase=False,
        tokenizer=words,
        token_pattern=None,
        min_df=2 if len(items) >= 1000 else 1,
        max_features=MAX_TERMS,
    )
    try:
        matrix = model.fit_transform(documents)
    except ValueError:  # scikit-learn raises it for an empty vocabulary
        return TextEncoder((), np.zeros(0, np.float32), np.zeros((0, dim), np.float32))
    terms = tuple(str(term) for term in model.get_feature_names_out())
    rank = min(dim, min(matrix.shape))
    _, _, right = randomized_svd(matrix, rank, n_iter=4, random_state=seed)
    components = np.zeros((len(terms), dim), dtype=np.float32)
    components[:, :rank] = right.T
    return TextEncoder(terms, model.idf_.astype(np.float32), components)


def collaborative_vectors(train: EventLog, num_items: int, dim: int, seed: int) -> np.ndarray:
    """Returns [I, dim] float32 vectors of unit length, zero for an item without events.

    A pair of items at distance d in a history counts 1 / d, up to distance 10.

    Args:
        train: Training events only; held-out events would leak into the vectors.
        num_items: I, the number of items.
        dim: Columns of the result.
        seed: Seed of the randomised SVD.
    """
    vectors = np.zeros((num_items, dim), dtype=np.float32)
    matrix = _pointwise_information(_sample_users(train), num_items)
    if matrix is None:
        return vectors
    rank = min(dim, num_items)
    left, singular, _ = randomized_svd(matrix, rank, n_iter=4, random_state=seed)
    vectors[:, :rank] = left * np.sqrt(singular)
    return unit(vectors)


def join_vectors(text: np.ndarray, collaborative: np.ndarray, weight: float) -> np.ndarray:
    """Returns [I, F + G] float32 of unit length: text, then `weight` times collaborative."""
    return unit(np.concatenate([text, weight * collaborative], axis=1))


def read_vectors(
    path: str | Path,
    item_ids: list[str],
    items_report: BadRows | None = None,
    columns: Mapping[str, str] | None = None,
) -> np.ndarray:
    """Reads the user's own vectors, in the order of `item_ids`.

    A `.npy` file is [rows of the items file, F]. A Parquet file, or a folder of its parts, has the
    columns `item_id` (string) and `vector` (list<float>), in any order; further items are ignored.

    Args:
        path: File or folder of vectors.
        item_ids: [I] item ids.
        items_report: Report on the items file, which tells the rows that became items. None means
            all rows.
        columns: Names of columns in the file by our name, as of `--column`.

    Returns:
        [I, F] float32 vectors.

    Raises:
        SchemaError: If the file is unreadable or has another layout.
        ValueError: If a vector is missing or not finite.
    """
    path = Path(path)
    if path.suffix == ".npy":
        vectors = _read_npy(path)
        expected = len(item_ids) if items_report is None else items_report.num_rows
        if len(vectors) != expected:
            raise ValueError(
                f"{path}: {len(vectors)} vectors; expected {expected}, one per item row"
            )
        if items_report is not None:
            vectors = vectors[items_report.kept_rows]
    else:
        vectors = _read_parquet(
            path, item_ids, names_of_table(columns or {}, "embeddings", VECTORS)
        )
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
        raise ValueError(f"{path}: the vector of item {item_ids[bad[0]]!r} is not finite")
    return vectors


def _read_npy(path: Path) -> np.ndarray:
    """Reads float vectors [rows, F] from a .npy file."""
    try:
        vectors = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SchemaError(f"{path}: not a readable .npy file ({error})") from error
    if vectors.ndim != 2 or vectors.shape[1] == 0 or vectors.dtype.kind != "f":
        raise SchemaError(
            f"{path}: {vectors.dtype} of shape {vectors.shape}; expected floats [items, dim]"
        )
    return np.asarray(vectors, dtype=np.float32)


def _read_parquet(path: Path, item_ids: list[str], names: Mapping[str, str]) -> np.ndarray:
    """Reads vectors from a Parquet file and sorts them by `item_ids`."""
    table = InputTable(path, VECTORS, names).table

    def accepts(kind: Any) -> bool:
        return bool(
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ) and pa.types.is_floating(kind.value_type)

    ids = id_column(table, path, "item_id")
    lists = column(table, path, "vector", accepts, "list<float>")
    lengths = pc.unique(pc.list_value_length(lists)).to_pylist()
    if len(lengths) != 1 or not lengths[0]:
        raise SchemaError(
            f"{path}: column vector has lengths {lengths[:5]}; expected one for all rows"
        )
    rows = pc.index_in(pa.array(item_ids, pa.large_string()), value_set=ids)
    if rows.null_count:
        missing = item_ids[int(np.flatnonzero(rows.is_null().to_numpy(False))[0])]
        raise ValueError(f"{path}: no vector for item {missing!r} ({rows.null_count} are missing)")
    flat = pc.cast(pc.list_flatten(lists), pa.float32()).combine_chunks()
    matrix = flat.to_numpy(zero_copy_only=False).reshape(table.num_rows, lengths[0])
    return np.ascontiguousarray(matrix[rows.to_numpy(zero_copy_only=False)], dtype=np.float32)


def _sample_users(train: EventLog) -> EventLog:
    """Returns the events of every k-th user, so that few more than MAX_PAIR_EVENTS are left.

    Each event makes up to WINDOW pairs, and their number bounds the matrix of pairs.
    """
    step = -(-train.num_events // MAX_PAIR_EVENTS)
    if step <= 1:
        return train
    kept = np.zeros(train.num_events, bool)
    for first, last in zip(
        train.offsets[:-1:step].tolist(), train.offsets[1::step].tolist(), strict=True
    ):
        kept[first:last] = True
    return train.select(kept)


def _pointwise_information(train: EventLog, num_items: int) -> Any:
    """Returns the positive mutual information of pairs as sparse [I, I] float64; None: no pair.

    The counts of some items at once bound the memory: one matrix of counts, then one of results.
    """
    parts = [
        _cooccurrence(train, num_items, first, last)
        for first, last in train.item_ranges(num_items, RANGE_EVENTS)
    ]
    rows = np.concatenate([np.asarray(part.sum(axis=1)).ravel() for part in parts])
    if not rows.any():
        return None
    # Smooth contexts with the power 3/4, or rare pairs dominate (Levy, Goldberg, Dagan 2015).
    context = rows**0.75
    context /= context.sum()
    indices, data, sizes, first = [], [], [], 0
    while parts:
        counts = parts.pop(0)
        lengths = np.diff(counts.indptr)
        own = np.repeat(rows[first : first + counts.shape[0]], lengths)
        pmi = np.log(counts.data / (own * context[counts.indices]))
        kept = pmi > 0
        indices.append(counts.indices[kept].astype(np.int32))
        data.append(pmi[kept])
        of_row = np.repeat(np.arange(counts.shape[0]), lengths)[kept]
        sizes.append(np.bincount(of_row, minlength=counts.shape[0]))
        first += counts.shape[0]
    starts = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    columns, values = np.concatenate(indices), np.concatenate(data)
    if starts[-1] <= np.iinfo(np.int32).max:
        starts = starts.astype(np.int32)
    return sparse.csr_array((values, columns, starts), shape=(num_items, num_items))


def _cooccurrence(train: EventLog, num_items: int, first: int, last: int) -> Any:
    """Returns sparse counts [last - first, I] of items near items `first` to `last` in a history.

    The counts are symmetric: of the items after an item, and of those before it.
    """
    shape = (last - first, num_items)
    after, before = sparse.csr_array(shape), sparse.csr_array(shape)
    for distance in range(1, WINDOW + 1):
        lefts, rights = [], []
        for events in train.pairs(distance):
            left, right = train.item_rows[events], train.item_rows[events + distance]
            different = left != right
            left, right = left[different], right[different]
            if shape[0] == num_items:
                lefts.append((left, right))
                continue
            own = (left >= first) & (left < last)
            lefts.append((left[own] - first, right[own]))
            own = (right >= first) & (right < last)
            rights.append((right[own] - first, left[own]))
        after = after + _count(lefts, distance, shape)
        if rights:
            before = before + _count(rights, distance, shape)
    return after + (after.T if shape[0] == num_items else before)


def _count(
    pairs: list[tuple[np.ndarray, np.ndarray]], distance: int, shape: tuple[int, int]
) -> Any:
    """Returns a sparse matrix that has 1 / distance for each pair of row and column."""
    none = np.zeros(0, np.int32)
    rows, columns = (np.concatenate(part) for part in zip((none, none), *pairs, strict=True))
    weights = np.full(rows.size, 1.0 / distance)
    return sparse.csr_array((weights, (rows, columns)), shape=shape)
