"""Reads an input file in any format, and collects its problems and what each column became."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.features.tables.column_names import list_names, rename_columns, suggest
from recserve.features.tables.conversions import convert_text
from recserve.features.tables.parquet import (
    MAX_TABLE_BYTES,
    ColumnUse,
    RowCheck,
    SchemaError,
    check_rows,
    is_text,
    read_table,
    read_table_chunks,
)
from recserve.features.tables.plain_columns import (
    plain_column,
    unreadable_rows,
    without_rows,
)
from recserve.features.tables.text_files import (
    DELIMITERS,
    LINE_SUFFIXES,
    Content,
    Rename,
    Unreadable,
    read_csv,
    read_csv_chunks,
    read_line_chunks,
    read_lines,
)

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
SHARED = ("item_id",)  # columns that files of items and of events have
# Integers below are short enough to share a column of text with fractions, as doubles.
SHORT_NUMBER = 10**15
NO_VALUE = "ignored: no row has a value"


def read_input(path: Path, rename: Rename) -> Content:
    """Reads a file of Parquet, CSV or JSON lines, told by its suffix; others are Parquet.

    Args:
        path: The file.
        rename: Returns our names of the columns, None for those to leave out.

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
        return _read_parquet(path, rename)
    if path.stat().st_size > MAX_TABLE_BYTES:
        raise SchemaError(f"{path}: {path.stat().st_size} bytes; at most {MAX_TABLE_BYTES}")
    content = (read_csv if suffix in DELIMITERS else read_lines)(path, rename)
    check_rows(content.table, path)
    return content


def _read_parquet(path: Path, rename: Rename) -> Content:
    table = read_table(path)
    try:
        ours = rename(table.column_names)
    except ValueError as error:
        raise SchemaError(f"{path}: {error}") from None
    return _parquet_content(path, table, ours)


def read_chunks(path: Path, rename: Rename, rows: int) -> Iterator[Content]:
    """Yields the rows of a file that `read_input` reads, in chunks; their types may differ.

    Args:
        path: The file.
        rename: As of `read_input`.
        rows: Rows of a chunk of Parquet; a chunk of CSV is a block of bytes.

    Raises:
        ArrowException, OSError, ValueError: If `read_input` would refuse the file, or if its rows
            can only be read together.
    """
    suffix = path.suffix.lower()
    if suffix in FOREIGN or not path.is_file():
        raise ValueError("the file is not read")
    if suffix in DELIMITERS or suffix in LINE_SUFFIXES:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise ValueError("the file is too large")
        yield from (read_csv_chunks if suffix in DELIMITERS else read_line_chunks)(path, rename)
        return
    ours: list[str | None] | None = None
    for table in read_table_chunks(path, rows):
        ours = rename(table.column_names) if ours is None else ours
        yield _parquet_content(path, table, ours)


def _parquet_content(path: Path, table: pa.Table, ours: list[str | None]) -> Content:
    columns: dict[str, pa.ChunkedArray] = {}
    notes: dict[str, str] = {}
    unreadable: list[Unreadable] = []
    for own, given, values in zip(ours, table.column_names, table.columns, strict=True):
        if own is None:
            continue
        try:
            values, note = plain_column(values)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise SchemaError(f"{path}: column {given} is {values.type}: {error}") from None
        notes |= {own: note} if note else {}
        rows = unreadable_rows(values)
        if rows.size:
            values = without_rows(values, rows)
            unreadable.append(
                Unreadable(own, rows, "not UTF-8", lambda row: "the text is not UTF-8")
            )
        columns[own] = values
    return Content(pa.table(columns), tuple(unreadable), notes)


class InputTable:
    """The table of an input file.

    Attributes:
        path: Path of the file.
        table: Its columns with our names.
        labels: Names of renamed columns for messages, by our name.
        problems: Reasons why the file cannot be used, one line each.
        uses: What the columns became, by our name.
    """

    def __init__(
        self,
        path: Path,
        known: Iterable[str],
        names: Mapping[str, str] | None = None,
        content: Content | None = None,
    ) -> None:
        """Reads a file.

        Args:
            path: Path of the file.
            known: Names of the columns that have a meaning.
            names: Names of columns in this file, by our name.
            content: What the file holds, if it has been read.

        Raises:
            SchemaError: If the file is unreadable or lacks a name.
        """
        names = names or {}
        self._left_out: list[str] = []

        def rename(given: list[str]) -> list[str | None]:
            ours = rename_columns(given, names, SHARED)
            self._left_out = [n for n, own in zip(given, ours, strict=True) if own is None]
            return ours

        self.path = path
        self._content = read_input(path, rename) if content is None else content
        self.table = self._content.table
        self._names = {
            own: name
            for own, name in names.items()
            if name != own and own in self.table.column_names
        }
        self.labels = {own: f"{name} ({own})" for own, name in self._names.items()}
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
            self.problems.append(f"{self.path}: column {self.label(name)} {error}")
            return default
        self.uses[name] = f"{use}; {note}" if note else use
        return values

    def own_name(self, name: str) -> str:
        """Returns our name of a column that is given by our name or by that in the file."""
        return next((own for own, given in self._names.items() if given == name), name)

    def label(self, name: str) -> str:
        """Returns the name of a column in messages: that in the file, and ours if it differs."""
        return self.labels.get(name, name)

    def reject_unreadable(self, check: RowCheck, names: Iterable[str]) -> None:
        """Rejects the rows that no column can hold.

        Args:
            check: Collects them.
            names: Columns that are used.
        """
        used = set(names)
        for one in self._content.unreadable:
            if one.column is None or one.column in used:
                bad = np.zeros(len(self), bool)
                bad[one.rows] = True
                check.refuse_unreadable(bad, one.reason, one.column or "", one.describe)

    def miss(self, wanted: str, names: tuple[str, ...]) -> None:
        """Notes that a required column is missing.

        Args:
            wanted: Description of the column.
            names: Names that the column may have, the most common first.
        """
        self._absent = [name for name in self._absent if name not in names]
        there = self.table.column_names
        meant = [(other, name) for name in names for other in there if suggest(other, [name])]
        hint = f"; name it with {flag(*meant[0][::-1])}" if meant else ""
        self.problems.append(
            f"{self.path}: column {wanted} is missing; the file has {list_names(there)}{hint}"
        )

    def suggestion(self, name: str) -> str:
        """Returns a hint if an unused column's name stands for a column that is absent."""
        meant = suggest(name, self._absent)
        if meant is None:
            return ""
        divided = meant == "categories" and is_text(self.table.schema.field(name).type)
        split = f" {split_flag(self.table.column(name))}" if divided else ""
        return f"; {MEANT} {meant}? name it with {flag(meant, name)}{split}"

    def check(self) -> None:
        """Raises SchemaError with all problems, one line each, and columns that may be misnamed."""
        if self.problems:
            misnamed = [
                f"{self.path}: column {self.label(name)}: {use}"
                for name, use in self.uses.items()
                if MEANT in use
            ]
            raise SchemaError("\n".join([*self.problems, *misnamed]))

    def columns(self) -> tuple[ColumnUse, ...]:
        """Returns what the columns became."""
        uses = []
        for column in self.table.schema:
            use, note = self.uses.get(column.name, ""), self._content.notes.get(column.name)
            use = f"{use}; {note}" if note and use else use
            name = self._names.get(column.name, column.name)
            uses.append(ColumnUse(name, str(column.type), use))
        for name in self._left_out:
            uses.append(ColumnUse(name, "left out", f"--column {name} names another column"))
        return tuple(uses)


class MixedChunksError(ValueError):
    """The chunks of a file do not tell what its columns are; it must be read at once."""


class ChunkedInput:
    """What the chunks of a file say about its columns, so far.

    A chunk is converted by itself. The columns of the whole file become the same if all chunks
    agree; if they do not, `MixedChunksError` says so.
    """

    def __init__(self, path: Path, known: Iterable[str], names: Mapping[str, str]) -> None:
        """Begins without chunks; the arguments are those of InputTable."""
        self.path, self.known, self.names = path, tuple(known), names
        self.left_out: list[str] = []
        self.types: dict[str, Any] = {}
        self.content_notes: dict[str, str] = {}
        self.present: set[str] = set()  # columns with a value
        self.without: set[str] = set()  # columns that had a chunk without a value, but with NaN
        self.uses: dict[str, tuple[str, str]] = {}
        self._long: set[str] = set()  # columns of integers that doubles may round

    def rename(self, given: list[str]) -> list[str | None]:
        """Returns our names of the columns. Raises ValueError if the file lacks a name."""
        ours = rename_columns(given, self.names, SHARED)
        self.left_out = [n for n, own in zip(given, ours, strict=True) if own is None]
        return ours

    def chunk(self, content: Content) -> ChunkTable:
        """Returns a chunk as a table."""
        table = content.table
        for name in table.column_names:
            self._add_type(name, table.column(name))
        for name, note in content.notes.items():
            if self.content_notes.setdefault(name, note) != note:
                raise MixedChunksError(f"{name}: {note}")
        return ChunkTable(self, content)

    def _add_type(self, name: str, values: pa.ChunkedArray) -> None:
        """Joins the type of a chunk's column with that of earlier chunks."""
        kind, known = values.type, self.types.get(name, pa.null())
        if kind == pa.int64() and (pc.max(pc.abs(values)).as_py() or 0) >= SHORT_NUMBER:
            self._long.add(name)
        if kind == known or pa.types.is_null(kind):
            self.types.setdefault(name, kind)
        elif pa.types.is_null(known):
            self.types[name] = kind
        elif {kind, known} == {pa.int64(), pa.float64()} and name not in self._long:
            self.types[name] = pa.float64()
        else:
            raise MixedChunksError(f"{name} is {kind} and {known}")

    def empty(self) -> InputTable:
        """Returns a table without rows that has the columns and uses of the whole file."""
        schema = pa.schema(list(self.types.items()))
        content = Content(schema.empty_table(), notes=self.content_notes)
        table = InputTable(self.path, self.known, self.names, content)
        table._left_out = self.left_out
        for name in table.table.column_names:
            if name in self.uses:
                use, note = self.uses[name]
                table.uses[name] = f"{use}; {note}" if note else use
            elif name in self.known:
                table.uses[name] = NO_VALUE
        return table


class ChunkTable(InputTable):
    """A chunk of the table of an input file."""

    def __init__(self, whole: ChunkedInput, content: Content) -> None:
        super().__init__(whole.path, whole.known, whole.names, content)
        self._whole = whole
        self._converted: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether a row of this chunk or of an earlier one has a value."""
        whole = self._whole
        if name not in self.table.column_names:
            return name in whole.present
        if super().has(name):
            if name in whole.without:
                raise MixedChunksError(f"{name} has values after NaN")
            whole.present.add(name)
        elif name not in whole.present and self.table.column(name).null_count < len(self):
            whole.without.add(name)
        return name in whole.present

    def require(self, name: str, convert: Convert[T], use: str, default: T) -> T:
        """Converts a column as InputTable does, and compares its note with earlier chunks."""
        there = name in self.table.column_names
        if name in self._whole.present and not (
            there and self.table.column(name).null_count < len(self)
        ):
            return default
        result = super().require(name, convert, use, default)
        made = self.uses.get(name)
        if made is not None and not self.problems and name not in self._converted:
            self._converted.add(name)
            note = made.removeprefix(use).removeprefix("; ")
            _, known = self._whole.uses.get(name, (use, ""))
            if note and known and note != known:
                raise MixedChunksError(f"{name}: {note} and {known}")
            self._whole.uses[name] = (use, note or known)
        return result


def flag(ours: str, theirs: str) -> str:
    """Returns the flag that names a column, for a shell."""
    return f"--column {shlex.quote(f'{ours}={theirs}')}"


def split_flag(texts: pa.ChunkedArray) -> str:
    """Returns the flag that divides the texts of categories."""
    texts = convert_text(texts)[0]
    separator = next((s for s in "|;," if pc.any(pc.match_substring(texts, s)).as_py()), "|")
    return f"--split categories='{separator}'"


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
            listed = list_names(source.table.column_names)
            source.problems.append(
                f"{source.path}: column {name} is missing, which --split names; the file has "
                f"{listed}"
            )


def _has_no_value(values: pa.ChunkedArray) -> bool:
    """Whether all rows are null or NaN."""
    if values.null_count == len(values):
        return True
    return bool(pa.types.is_floating(values.type) and pc.all(pc.is_nan(values)).as_py())
