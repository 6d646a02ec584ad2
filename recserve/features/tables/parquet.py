"""Reads Parquet tables from outside, checks their schema and records rejected rows.

A wrong schema is always an error. An invalid row is an error under `on_bad_rows="error"`. Under
`"skip"` it is dropped and counted, and the first examples are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

OnBadRows = Literal["error", "skip"]
MAX_TABLE_BYTES = 32 << 30
MAX_EXAMPLES = 10
_CONVERT = "pyarrow.parquet.write_table(pyarrow.csv.read_csv(CSV), PARQUET)"
# How a column of another type is converted, by expected type; `column` is table[name].
CONVERSIONS = {
    "string": "pyarrow.compute.cast(column, 'string')",
    "string or integer": "pyarrow.compute.cast(column, 'string')",
    "list<string>": "pyarrow.compute.split_pattern(column, '|')",
    "timestamp": "pyarrow.compute.cast(column, pyarrow.timestamp('s')), for seconds or RFC 3339",
    "integer": "pyarrow.compute.cast(column, 'int64')",
    "float": "pyarrow.compute.cast(column, 'float32')",
}


class SchemaError(ValueError):
    """The file is unreadable or empty, or a column is missing or of the wrong type."""


class BadRowError(ValueError):
    """A row of the file is invalid; the message names file, column and row."""


@dataclass(frozen=True)
class BadRows:
    """Report of rejected and changed rows of a file.

    Attributes:
        file: Path of the file.
        num_rows: Rows in the file.
        kept_rows: [n] int64 file rows that were accepted, in file order.
        dropped: Number of rejected rows, by reason.
        notes: Number of accepted but changed rows, by reason.
        examples: Messages about the first rejected rows.
        ignored_columns: Columns that are not used.
    """

    file: str
    num_rows: int
    kept_rows: np.ndarray
    dropped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    ignored_columns: tuple[str, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Number of rejected rows."""
        return sum(self.dropped.values())

    def lines(self) -> list[str]:
        """Returns the report as lines for a terminal; no lines if there is nothing to report."""
        lines = []
        if self.num_dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            lines.append(
                f"{self.file}: dropped {self.num_dropped} of {self.num_rows} rows: {reasons}"
            )
            lines += [f"  {example}" for example in self.examples]
        lines += [f"{self.file}: {count} {reason}" for reason, count in self.notes.items()]
        if self.ignored_columns:
            lines.append(f"{self.file}: columns not used: {', '.join(self.ignored_columns)}")
        return lines


class RowCheck:
    """Collects rejected rows of one table under one policy. Rows are numbered from 0.

    Attributes:
        path: Path of the file, for messages.
        on_bad_rows: "error" raises at the first rejected row, "skip" counts rejected rows.
        kept: [num_rows] bool, True for rows that are not rejected.
        dropped: Number of rejected rows, by reason.
        notes: Number of accepted but changed rows, by reason.
        examples: Messages about the first rejected rows.

    Raises:
        ValueError: If the policy is neither "error" nor "skip".
    """

    def __init__(self, path: Path, num_rows: int, on_bad_rows: OnBadRows) -> None:
        if on_bad_rows not in ("error", "skip"):
            raise ValueError(f"on_bad_rows is {on_bad_rows!r}; expected 'error' or 'skip'")
        self.path = path
        self.on_bad_rows = on_bad_rows
        self.kept = np.ones(num_rows, dtype=bool)
        self.dropped: dict[str, int] = {}
        self.notes: dict[str, int] = {}
        self.examples: list[str] = []

    def refuse(
        self, bad: np.ndarray, reason: str, column: str, describe: Callable[[int], str]
    ) -> None:
        """Rejects rows that are invalid and not yet rejected.

        Args:
            bad: [num_rows] bool, True for invalid rows.
            reason: Short name of the reason, used for counting.
            column: Name of the column.
            describe: Maps a file row to the details in the message.

        Raises:
            BadRowError: If a row is rejected under "error".
        """
        rows = np.flatnonzero(bad & self.kept)
        if not rows.size:
            return
        messages = [
            f"column {column}, row {row}: {describe(int(row))}"
            for row in rows[: MAX_EXAMPLES - len(self.examples)]
        ]
        if self.on_bad_rows == "error":
            raise BadRowError(
                f"{self.path}: {messages[0]} ({reason}; {rows.size} such rows of {self.kept.size}, "
                "rows count from 0); repair the file, or drop such rows with --on-bad-rows skip"
            )
        self.examples += messages
        self.dropped[reason] = self.dropped.get(reason, 0) + int(rows.size)
        self.kept[rows] = False

    def note(self, reason: str, count: int) -> None:
        """Counts accepted rows that were changed."""
        if count:
            self.notes[reason] = self.notes.get(reason, 0) + count

    def report(self, ignored_columns: tuple[str, ...] = ()) -> BadRows:
        """Returns the collected report."""
        return BadRows(
            str(self.path),
            self.kept.size,
            np.flatnonzero(self.kept),
            dict(self.dropped),
            dict(self.notes),
            tuple(self.examples),
            ignored_columns,
        )


def read_table(path: Path) -> pa.Table:
    """Reads a whole file. Raises SchemaError if it is missing, not Parquet, too large or empty."""
    if not path.is_file():
        raise SchemaError(f"{path}: no such file")
    try:
        with pq.ParquetFile(path) as file:
            meta = file.metadata
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            if size > MAX_TABLE_BYTES:
                raise SchemaError(f"{path}: {size} bytes uncompressed; at most {MAX_TABLE_BYTES}")
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        hint = f"; a CSV file becomes one by: {_CONVERT}" if path.suffix != ".parquet" else ""
        raise SchemaError(f"{path}: not a readable Parquet file ({error}){hint}") from error
    names = table.column_names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SchemaError(f"{path}: column {repeated[0]} appears more than once")
    if table.num_rows == 0:
        raise SchemaError(f"{path}: the file has no rows; expected at least one")
    return table


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is a string type, plain or dictionary-encoded."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
    )


def column(
    table: pa.Table, path: Path, name: str, accepts: Callable[[Any], bool], expected: str
) -> pa.ChunkedArray:
    """Returns one column.

    Args:
        table: Table of the file.
        path: Path of the file, for messages.
        name: Name of the column.
        accepts: Whether an Arrow type is accepted.
        expected: Name of the accepted type, for messages.

    Raises:
        SchemaError: If the column is missing or mistyped. The message names file and column.
    """
    if name not in table.column_names:
        listed = ", ".join(table.column_names)
        raise SchemaError(f"{path}: column {name} ({expected}) is missing; the file has {listed}")
    values = table.column(name)
    if not accepts(values.type):
        hint = f"; convert it with {CONVERSIONS[expected]}" if expected in CONVERSIONS else ""
        raise SchemaError(f"{path}: column {name} is {values.type}; expected {expected}{hint}")
    return values


def text_column(table: pa.Table, path: Path, name: str) -> pa.Array:
    """Returns one text column as a single large_string array."""
    values = column(table, path, name, is_text, "string")
    return pc.cast(values, pa.large_string()).combine_chunks()


def id_column(table: pa.Table, path: Path, name: str) -> pa.Array:
    """Returns one column of ids as a large_string array; integers become their digits."""

    def accepts(kind: Any) -> bool:
        return is_text(kind) or bool(pa.types.is_integer(kind))

    values = column(table, path, name, accepts, "string or integer")
    return pc.cast(values, pa.large_string()).combine_chunks()


def null_or_blank(values: pa.Array) -> np.ndarray:
    """Returns [n] bool, True where a text is null or empty."""
    blank = pc.fill_null(pc.equal(pc.binary_length(values), 0), True)
    return np.asarray(blank.to_numpy(zero_copy_only=False), dtype=bool)
