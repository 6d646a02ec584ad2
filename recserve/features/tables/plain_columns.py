"""Brings columns of any Arrow type into the types that the rest of recserve reads.

| type in the file | read as |
|---|---|
| UUID | its text, such as `123e4567-e89b-12d3-a456-426614174000` |
| other extension types (`arrow.json`, `arrow.bool8`, ...) | the type that stores their values |
| text, bytes and lists as views | plain text, bytes and lists |
| run-end encoded columns | their values |

Other types stay, also dictionary-encoded ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MAX_COLUMNS = 4096  # of a file, those in nested columns included
TOO_WIDE = f"more than {MAX_COLUMNS} columns; expected at most {MAX_COLUMNS}"
UUID, BOOL8 = "arrow.uuid", "arrow.bool8"
UUIDS = "UUIDs read as text"


def plain_column(values: pa.ChunkedArray) -> tuple[pa.ChunkedArray, str]:
    """Returns a column in a plain type, and a note if its values changed their form."""
    kind = values.type
    if _is_plain(kind):
        return values, ""
    chunks = [_plain(chunk) for chunk in values.chunks]
    return pa.chunked_array(chunks, _plain_type(kind)), UUIDS if _has_uuid(kind) else ""


def plain_table(table: pa.Table) -> pa.Table:
    """Returns a table with columns of plain types."""
    for place, field in enumerate(table.schema):
        if not _is_plain(field.type):
            table = table.set_column(place, field.name, plain_column(table.column(place))[0])
    return table


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema that `plain_table` gives."""
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def check_width(names: Iterable[str]) -> None:
    """Raises ValueError if a file has too many columns, or two of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            shown = f"column {name}" if name.strip() else "a column without a name"
            raise ValueError(f"{shown} appears more than once")
        seen.add(name)
    if len(seen) > MAX_COLUMNS:
        raise ValueError(TOO_WIDE)


def check_parquet(file: pq.ParquetFile) -> None:
    """Raises ValueError if a file has too many columns, or two of one name."""
    if file.metadata.num_columns > MAX_COLUMNS:  # before its schema becomes one of Arrow
        raise ValueError(f"{TOO_WIDE}, nested ones included")
    check_width(file.schema_arrow.names)


def unreadable_rows(values: pa.ChunkedArray) -> np.ndarray:
    """Returns the rows of a column that hold bytes which are no text."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
    else:
        return np.zeros(0, np.int64)
    found, start = [], 0
    for chunk in values.chunks:
        for row in range(len(chunk)):
            try:
                chunk.take(pa.array([row])).validate(full=True)
            except pa.ArrowInvalid:
                found.append(start + row)
        start += len(chunk)
    return np.array(found, np.int64)


def without_rows(values: pa.ChunkedArray, rows: np.ndarray) -> pa.ChunkedArray:
    """Returns a column with null at some rows."""
    null = np.zeros(len(values), bool)
    null[rows] = True
    return values.take(pa.array(np.arange(len(values)), mask=null))


def _is_plain(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType) or kind in (pa.string_view(), pa.binary_view()):
        return False
    if pa.types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if pa.types.is_run_end_encoded(kind) or _is_view(kind):
        return False
    return not pa.types.is_nested(kind) or all(
        _is_plain(kind.field(n).type) for n in range(kind.num_fields)
    )


def _is_view(kind: Any) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _has_uuid(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return bool(kind.extension_name == UUID)
    if pa.types.is_dictionary(kind):
        return _has_uuid(kind.value_type)
    return pa.types.is_nested(kind) and any(
        _has_uuid(kind.field(n).type) for n in range(kind.num_fields)
    )


def _plain_type(kind: Any) -> Any:
    """Returns the type that `_plain` gives."""
    if _is_plain(kind):
        return kind
    if isinstance(kind, pa.BaseExtensionType):
        own = {UUID: pa.string(), BOOL8: pa.bool_()}
        return own.get(kind.extension_name) or _plain_type(kind.storage_type)
    if kind in (pa.string_view(), pa.binary_view()):
        return pa.string() if kind == pa.string_view() else pa.binary()
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_struct(kind):
        fields = (kind.field(n) for n in range(kind.num_fields))
        return pa.struct([(field.name, _plain_type(field.type)) for field in fields])
    if pa.types.is_map(kind):
        return _plain_type(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    return pa.list_(_plain_type(kind.value_type))


def _plain(values: pa.Array) -> pa.Array:
    """Returns an array in a plain type."""
    kind = values.type
    if _is_plain(kind):
        return values
    if isinstance(kind, pa.BaseExtensionType):
        storage = values.storage
        if kind.extension_name == UUID:
            texts = (None if v is None else str(uuid.UUID(bytes=v)) for v in storage.to_pylist())
            return pa.array(texts, pa.string())
        return _plain(storage.cast(pa.bool_()) if kind.extension_name == BOOL8 else storage)
    if pa.types.is_dictionary(kind):
        return _plain(values.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(values))
    if kind in (pa.string_view(), pa.binary_view()):
        return values.cast(pa.string() if kind == pa.string_view() else pa.binary())
    if pa.types.is_struct(kind):
        parts = [_plain(part) for part in values.flatten()]
        names = [kind.field(n).name for n in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, names, mask=values.is_null())
    if pa.types.is_map(kind):
        return _plain(values.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))))
    lists = values.cast(pa.list_(kind.value_type))
    inner = _plain(lists.flatten())
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    ends = pa.array(offsets.astype(np.int32))
    return pa.ListArray.from_arrays(ends, inner, mask=lists.is_null())
