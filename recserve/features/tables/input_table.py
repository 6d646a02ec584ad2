"""Reads an input file in any format, and collects its problems and what each column became."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from recserve.features.tables.column_names import suggest
from recserve.features.tables.parquet import (
    MAX_TABLE_BYTES,
    ColumnUse,
    SchemaError,
    check_table,
    read_table,
)
from recserve.features.tables.text_files import DELIMITERS, LINE_SUFFIXES, read_csv, read_lines

T = TypeVar("T")
Convert = Callable[[pa.ChunkedArray], tuple[T, str]]
MEANT = "did you mean"
UNPACK = "unpack it first"
# Files that are not read, with what to do about them.
FOREIGN = dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz"), UNPACK) | {
    ".xls": "save it as CSV UTF-8",
    ".xlsx": "save it as CSV UTF-8",
    ".ods": "save it as CSV UTF-8",
    ".pkl": "write it with DataFrame.to_parquet",
    ".pickle": "write it with DataFrame.to_parquet",
    ".feather": "write it with DataFrame.to_parquet",
    ".avro": "write it as Parquet",
    ".orc": "write it as Parquet",
}
NO_VALUE = "ignored: no row has a value"


def read_input(path: Path) -> pa.Table:
    """Reads a file of Parquet, CSV or JSON lines, told by its suffix; others are Parquet.

    Raises:
        SchemaError: If the file is missing, unreadable, too large or empty.
    """
    if path.is_dir():
        raise SchemaError(f"{path}: is a folder; expected a file")
    if not path.is_file():
        raise SchemaError(f"{path}: no such file")
    suffix = path.suffix.lower()
    if suffix in FOREIGN:
        raise SchemaError(f"{path}: expected Parquet, CSV or JSON lines; {FOREIGN[suffix]}")
    if suffix not in DELIMITERS and suffix not in LINE_SUFFIXES:
        return read_table(path)
    if path.stat().st_size > MAX_TABLE_BYTES:
        raise SchemaError(f"{path}: {path.stat().st_size} bytes; at most {MAX_TABLE_BYTES}")
    table = read_csv(path) if suffix in DELIMITERS else read_lines(path)
    check_table(table, path)
    return table


class InputTable:
    """The table of an input file.

    Attributes:
        path: Path of the file.
        table: Its columns.
        problems: Reasons why the file cannot be used, one line each.
        uses: What the columns became, by name.
    """

    def __init__(self, path: Path, known: Iterable[str]) -> None:
        """Reads a file.

        Args:
            path: Path of the file.
            known: Names of the columns that have a meaning.

        Raises:
            SchemaError: If the file is unreadable.
        """
        self.path = path
        self.table = read_input(path)
        self.problems: list[str] = []
        self.uses: dict[str, str] = {}
        self._absent = [name for name in known if name not in self.table.column_names]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def has(self, name: str) -> bool:
        """Whether there is a column in which a row has a value."""
        return name in self.table.column_names and not _has_no_value(self.table.column(name))

    def convert(self, name: str, convert: Convert[T], use: str, default: T) -> T:
        """Returns a converted column, or `default` if it is absent, has no value or is unusable."""
        if not self.has(name):
            if name in self.table.column_names:
                self.uses[name] = NO_VALUE
            return default
        return self.require(name, convert, use, default)

    def require(self, name: str, convert: Convert[T], use: str, default: T) -> T:
        """Returns a converted column, or notes a problem and returns `default`."""
        if name not in self.table.column_names:
            self.miss(f"{name} (string or integer)", (name,))
            return default
        try:
            values, note = convert(self.table.column(name))
        except SchemaError as error:
            self.problems.append(f"{self.path}: column {name} {error}")
            return default
        self.uses[name] = f"{use}; {note}" if note else use
        return values

    def miss(self, wanted: str, names: tuple[str, ...]) -> None:
        """Notes that a required column is missing.

        Args:
            wanted: Description of the column.
            names: Names that the column may have, the most common first.
        """
        self._absent = [name for name in self._absent if name not in names]
        there = self.table.column_names
        meant = [(other, name) for name in names for other in there if suggest(other, [name])]
        hint = f"; rename {meant[0][0]} to {meant[0][1]}" if meant else ""
        self.problems.append(
            f"{self.path}: column {wanted} is missing; the file has {', '.join(there)}{hint}"
        )

    def suggestion(self, name: str) -> str:
        """Returns a hint if an unused column's name stands for a column that is absent."""
        meant = suggest(name, self._absent)
        return "" if meant is None else f"; {MEANT} {meant}? rename the column"

    def check(self) -> None:
        """Raises SchemaError with all problems, one line each, and columns that may be misnamed."""
        if self.problems:
            misnamed = [
                f"{self.path}: column {name}: {use}"
                for name, use in self.uses.items()
                if MEANT in use
            ]
            raise SchemaError("\n".join([*self.problems, *misnamed]))

    def columns(self) -> tuple[ColumnUse, ...]:
        """Returns what the columns became, in the order of the file."""
        return tuple(
            ColumnUse(field.name, str(field.type), self.uses.get(field.name, ""))
            for field in self.table.schema
        )


def check_split(source: InputTable, split: Mapping[str, str], whole: Iterable[str]) -> None:
    """Notes a problem for each column that is to be divided and cannot be.

    Args:
        source: The file.
        split: Separators by name of a column.
        whole: Names of columns that are one text.
    """
    for name in split:
        if name in whole:
            source.problems.append(f"{source.path}: column {name} is one text; --split names it")
        if name not in source.table.column_names:
            listed = ", ".join(source.table.column_names)
            source.problems.append(
                f"{source.path}: column {name} is missing, which --split names; the file has "
                f"{listed}"
            )


def _has_no_value(values: pa.ChunkedArray) -> bool:
    """Whether all rows are null or NaN."""
    if values.null_count == len(values):
        return True
    return bool(pa.types.is_floating(values.type) and pc.all(pc.is_nan(values)).as_py())
