"""Parquet tables from outside: schema checks, and a ledger of rows that were refused.

A wrong schema is always an error. A wrong row is an error under `on_bad_rows="error"`; under
`"skip"` it is counted, its first examples are kept, and it is dropped.
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


class SchemaError(ValueError):
    """The file is unreadable, empty, or a column is missing or of the wrong type."""


class BadRowError(ValueError):
    """A row of the file cannot be used; the message names file, column and row."""


@dataclass(frozen=True)
class BadRows:
    """What reading a file refused or changed.

    num_rows: rows in the file. kept_rows [n] int64: file rows that were kept, in file order.
    dropped: rows refused, by reason. notes: rows kept but changed, by reason. examples: the first
    refused rows, in words.
    ignored_columns: columns that nothing reads.
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
        """Rows that were refused."""
        return sum(self.dropped.values())

    def lines(self) -> list[str]:
        """The report for a terminal; empty when nothing is to be said."""
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
    """Collects refused rows of one table under one policy; rows are numbered from 0.

    Raises ValueError if the policy is neither "error" nor "skip".
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
        """Refuse the rows where `bad` [num_rows] is set and that are still kept.

        describe: file row to words for the message. Raises BadRowError under "error".
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
        """Report `count` rows that were kept but changed."""
        if count:
            self.notes[reason] = self.notes.get(reason, 0) + count

    def report(self, ignored_columns: tuple[str, ...] = ()) -> BadRows:
        """The ledger as a value."""
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
    """The whole file. Raises SchemaError if missing, not Parquet, too large or empty."""
    if not path.is_file():
        raise SchemaError(f"{path}: no such file")
    try:
        with pq.ParquetFile(path) as file:
            meta = file.metadata
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            if size > MAX_TABLE_BYTES:
                raise SchemaError(f"{path}: {size} bytes unpacked; the bound is {MAX_TABLE_BYTES}")
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"{path}: not a readable Parquet file ({error})") from error
    names = table.column_names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SchemaError(f"{path}: column {repeated[0]} appears more than once")
    if table.num_rows == 0:
        raise SchemaError(f"{path}: the file has no rows; expected at least one")
    return table


def is_text(kind: Any) -> bool:
    """Any of Arrow's string types, dictionary-encoded ones included."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
    )


def column(
    table: pa.Table, path: Path, name: str, accepts: Callable[[Any], bool], expected: str
) -> pa.ChunkedArray:
    """One column. Raises SchemaError, naming file and column, if it is missing or mistyped."""
    if name not in table.column_names:
        listed = ", ".join(table.column_names)
        raise SchemaError(f"{path}: column {name} ({expected}) is missing; the file has {listed}")
    values = table.column(name)
    if not accepts(values.type):
        raise SchemaError(f"{path}: column {name} is {values.type}; expected {expected}")
    return values


def text_column(table: pa.Table, path: Path, name: str) -> pa.Array:
    """One text column as a single large_string array."""
    values = column(table, path, name, is_text, "string")
    return pc.cast(values, pa.large_string()).combine_chunks()


def null_or_blank(values: pa.Array) -> np.ndarray:
    """[n] bool, set where a text is null or empty."""
    blank = pc.fill_null(pc.equal(pc.binary_length(values), 0), True)
    return np.asarray(blank.to_numpy(zero_copy_only=False), dtype=bool)
