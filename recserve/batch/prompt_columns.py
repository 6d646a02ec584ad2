"""Columns of text jobs on Parquet: of the prompts, the completions and the rejected rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from recserve.batch.rows import (
    Accepts,
    id_text,
    is_any_text,
    is_id,
    is_list_of,
    is_number,
    optional,
    read_rows,
)
from recserve.batch.source import InputFile, PlacedIds, check_unique, read_columns
from recserve.features.tables.column_names import list_names
from recserve.features.tables.parquet import SchemaError, column, is_list
from recserve.features.tables.plain_columns import plain_schema

COMPLETIONS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("custom_id", pa.string()),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
    ]
)
PROMPT_ERRORS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("custom_id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
    ]
)


def _is_turns(kind: Any) -> bool:
    return bool(
        is_list(kind)
        and pa.types.is_struct(kind.value_type)
        and {"role", "content"}
        <= {kind.value_type.field(n).name for n in range(kind.value_type.num_fields)}
    )


SOURCES: dict[str, tuple[Accepts, str]] = {
    "prompt": (is_any_text, "string"),
    "messages": (_is_turns, "list<struct<role: string, content: string>>"),
}
OPTIONS: dict[str, tuple[Accepts, str]] = {
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "n", "seed", "top_k"), (optional(is_number), "an integer")
    ),
    **dict.fromkeys(
        (
            *("temperature", "top_p", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty"),
        ),
        (optional(is_number), "a number"),
    ),
    "stop": (optional(is_list_of(is_any_text)), "list<string>"),
}
PROMPT_COLUMNS: dict[str, tuple[Accepts, str]] = {
    "custom_id": (optional(is_id), "string or integer"),
    **SOURCES,
    **OPTIONS,
}


def check_prompts(files: Sequence[InputFile]) -> tuple[str, ...]:
    """Checks files of prompts and returns the ignored columns.

    Raises:
        SchemaError: If a column is missing or mistyped, or two rows have the same `custom_id`.
    """
    unused = [name for file in files for name in _check_columns(file)]
    check_unique(lambda: _row_ids(files))
    return tuple(unused)


def _row_ids(files: Sequence[InputFile]) -> PlacedIds:
    """Yields the `custom_id` of each row that has one, and where the row is."""
    for file in files:
        if "custom_id" not in file.schema.names:
            continue
        row = 0
        for table in read_columns(file, ["custom_id"]):
            for one in read_rows(table, ["custom_id"])[0]:
                if one["custom_id"] is not None:
                    yield str(id_text(one["custom_id"])), f"{file.path}: row {row}"
                row += 1


def _check_columns(file: InputFile) -> tuple[str, ...]:
    """Checks the columns of a file of prompts and returns the ignored ones. Raises SchemaError."""
    names = file.schema.names
    if len([name for name in SOURCES if name in names]) != 1:
        raise SchemaError(
            f"{file.path}: expected a column prompt or a column messages; the file has "
            f"{list_names(names)}"
        )
    empty = plain_schema(file.schema).empty_table()
    for name, (accepts, expected) in PROMPT_COLUMNS.items():
        if name in names:
            column(empty, file.path, name, accepts, expected)
    return tuple(name for name in names if name not in PROMPT_COLUMNS)
