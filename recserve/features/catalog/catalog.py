"""The catalogue: an immutable, versioned snapshot of all items."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from recserve.bounds import MAX_ID_LENGTH
from recserve.features.catalog.item_times import ItemTimes
from recserve.features.catalog.semantic_ids import SemanticIds
from recserve.features.tables.items import ItemTable, item_table
from recserve.features.tables.parquet import SchemaError, longer_than, null_or_blank, read_table
from recserve.files import parse_record, read_arrays, whole_file

SEMANTIC_ID, POPULARITY = "__semantic_id", "__popularity"
METADATA_KEY = b"recserve"
MAX_CODES = 1 << 16  # of a level; codes are uint16


def item_key(item_id: str) -> int:
    """Returns the unsigned 64-bit key of an item id, which histories store in place of the id.

    The key is the same in every process.
    """
    return int.from_bytes(blake2b(item_id.encode(), digest_size=8).digest(), "little")


def item_keys(item_ids: Sequence[str]) -> np.ndarray:
    """Returns [n] uint64 keys of item ids."""
    return np.fromiter(map(item_key, item_ids), dtype=np.uint64, count=len(item_ids))


@dataclass(frozen=True)
class Catalog:
    """All items of a bundle, by row.

    Attributes:
        version: Prefix of the content's hash.
        items: Ids, titles, category paths and attributes of I items.
        semantic_ids: Semantic ids of the items.
        popularity: [I] float32 training events per item.
        vectors: [I, F] float32 item vectors.

    Raises:
        ValueError: If the parts differ in their number of items, two ids are equal, or two have the
            same 64-bit key.
    """

    version: str
    items: ItemTable
    semantic_ids: SemanticIds
    popularity: np.ndarray
    vectors: np.ndarray

    def __post_init__(self) -> None:
        sizes = {
            "items": len(self.items),
            "semantic ids": self.semantic_ids.num_items,
            "popularity": len(self.popularity),
            "vectors": len(self.vectors),
        }
        if len(set(sizes.values())) != 1:
            raise ValueError(f"the catalogue's parts differ in size: {sizes}")
        keys, rows = self._rows_by_key
        same = np.flatnonzero(keys[1:] == keys[:-1])
        if same.size:
            one, two = (self.items.ids[rows[same[0] + i]] for i in (0, 1))
            if one == two:
                raise ValueError(f"item {one!r} occurs twice; expected distinct item ids")
            raise ValueError(
                f"items {one!r} and {two!r} have the same 64-bit key; rename one of them"
            )

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def keys(self) -> np.ndarray:
        """[I] uint64 key of each item."""
        return item_keys(self.items.ids)

    def rows_of_keys(self, keys: np.ndarray) -> np.ndarray:
        """Returns [n] int32 rows of uint64 item keys, -1 for unknown keys."""
        known, rows = self._rows_by_key
        places = np.searchsorted(known, keys)
        places[places == len(known)] = 0
        return np.where(known[places] == keys, rows[places], -1).astype(np.int32)

    @cached_property
    def times(self) -> ItemTimes:
        """When the items may be recommended."""
        return ItemTimes.of_table(self.items)

    @cached_property
    def newest(self) -> np.ndarray:
        """[I] int64 rows, the latest `available_from` first, of equal ones the last row."""
        keys = np.zeros(len(self), np.int64)
        keys[self.times.rows] = self.times.newest
        return np.argsort(keys, kind="stable")[::-1]

    @cached_property
    def _rows_by_key(self) -> tuple[np.ndarray, np.ndarray]:
        """Ascending item keys [I] and the row of each."""
        rows = np.argsort(self.keys, kind="stable").astype(np.int32)
        return self.keys[rows], rows

    def save(self, table_path: Path, vectors_path: Path) -> None:
        """Writes items, semantic ids and popularity as Parquet, and vectors as safetensors."""
        flat = pa.array(self.semantic_ids.codes.ravel(), pa.uint16())
        table = self.items.to_arrow()
        table = table.append_column(
            SEMANTIC_ID, pa.FixedSizeListArray.from_arrays(flat, self.semantic_ids.num_levels)
        )
        table = table.append_column(POPULARITY, pa.array(self.popularity, pa.float32()))
        header = {
            "codebook_sizes": self.semantic_ids.codebook_sizes,
            "has_disambiguation": self.semantic_ids.has_disambiguation,
        }
        table = table.replace_schema_metadata({METADATA_KEY: json.dumps(header).encode()})
        pq.write_table(table, table_path, compression="zstd")
        with whole_file(vectors_path) as new:
            save_file({"vectors": np.ascontiguousarray(self.vectors, np.float32)}, new)

    @staticmethod
    def load(table_path: Path, vectors_path: Path, version: str) -> Catalog:
        """Reads what `save` wrote.

        Args:
            table_path: Parquet file of the items.
            vectors_path: safetensors file of the vectors.
            version: Version of the catalogue.

        Raises:
            SchemaError: If a file is damaged.
            ValueError: If the parts do not fit each other.
        """
        table = read_table(table_path)
        try:
            _check_columns(table)
            sizes, has_disambiguation = _read_header(table)
            ids = table.column(SEMANTIC_ID).cast(pa.list_(pa.uint16(), len(sizes)))
            flat = pc.list_flatten(ids).combine_chunks().to_numpy(zero_copy_only=False)
            codes = np.ascontiguousarray(flat.reshape(table.num_rows, len(sizes)), np.uint16)
            popularity = table.column(POPULARITY).cast(pa.float32()).to_numpy()
            if not (np.isfinite(popularity) & (popularity >= 0)).all():
                raise SchemaError(f"column {POPULARITY} holds no counts of events")
            items = item_table(table.drop_columns([SEMANTIC_ID, POPULARITY]))
        except (SchemaError, RecursionError, pa.ArrowException, OSError) as error:
            raise SchemaError(f"{table_path}: not a catalogue: {error}") from error
        vectors = read_arrays(vectors_path, ("vectors",))["vectors"]
        if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.shape[1]:
            raise SchemaError(
                f"{vectors_path}: vectors are {vectors.dtype} {vectors.shape}; expected float32 "
                "[items, dim]"
            )
        index = SemanticIds(items.ids, codes, sizes, has_disambiguation)
        return Catalog(version, items, index, np.array(popularity), vectors)


def _check_columns(table: Any) -> None:
    """Raises SchemaError if a column of a catalogue is missing, mistyped or has a null."""
    for name, fits, expected in (
        ("item_id", pa.types.is_string, "string"),
        ("title", pa.types.is_string, "string"),
        ("categories", partial(_is_list, pa.types.is_string), "list<string>"),
        (SEMANTIC_ID, partial(_is_list, pa.types.is_integer), "lists of integers"),
        (POPULARITY, pa.types.is_floating, "floats"),
    ):
        if table.column_names.count(name) != 1:
            raise SchemaError(f"there are {table.column_names.count(name)} columns {name}, not one")
        column = table.column(name)
        if not fits(column.type):
            raise SchemaError(f"column {name} is {column.type}; expected {expected}")
        nested = pa.types.is_nested(column.type)
        if column.null_count or (nested and pc.list_flatten(column).null_count):
            raise SchemaError(f"column {name} holds null; expected a value in every row")
    ids = table.column("item_id").combine_chunks()
    if table.num_rows and (null_or_blank(ids).any() or longer_than(ids, MAX_ID_LENGTH).any()):
        raise SchemaError(
            f"column item_id holds an id that is empty or longer than {MAX_ID_LENGTH} characters"
        )


def _is_list(of: Callable[[Any], bool], kind: Any) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and of(kind.value_type)


@dataclass(frozen=True)
class _Header:
    codebook_sizes: tuple[int, ...]
    has_disambiguation: bool


def _read_header(table: Any) -> tuple[tuple[int, ...], bool]:
    """Returns the codebook sizes, and whether the last level only separates items."""
    try:
        header = json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"null"))
    except ValueError as error:
        raise SchemaError(f"metadata {METADATA_KEY.decode()} is not JSON: {error}") from error
    try:
        found = parse_record(header if isinstance(header, dict) else {}, _Header)
    except ValueError as error:
        raise SchemaError(f"metadata {METADATA_KEY.decode()}: {error}") from error
    if not found.codebook_sizes or not all(1 <= n <= MAX_CODES for n in found.codebook_sizes):
        raise SchemaError(
            f"metadata {METADATA_KEY.decode()}: codebook_sizes is {found.codebook_sizes}; expected "
            f"one size in 1..{MAX_CODES} per level"
        )
    return found.codebook_sizes, found.has_disambiguation
