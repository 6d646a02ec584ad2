"""Reads an input file in any format, and collects its problems and what each column became."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.features.tables.column_names import list_names, rename_columns, suggest
from recserve.features.tables.conversions import convert_text
from recserve.features.tables.event_files import is_event_log
from recserve.features.tables.parquet import (
    MAX_TABLE_BYTES,
    ColumnUse,
    Places,
    RowCheck,
    SchemaError,
    check_rows,
    explain,
    is_text,
    name_beside,
    parquet_errors,
    read_table_chunks,
)
from recserve.features.tables.plain_columns import (
    check_parquet,
    plain_column,
    unreadable_rows,
    without_rows,
)
from recserve.features.tables.text_files import (
    DELIMITERS,
    LINE_SUFFIXES,
    Block,
    Content,
    Rename,
    Unreadable,
    csv_content,
    find_delimiter,
    lines_content,
    places_of,
    read_csv_blocks,
    read_line_blocks,
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


def kind_of(path: Path) -> Literal["CSV", "JSON lines", "Parquet"]:
    """Returns the kind of a file, told by its suffix; others are Parquet."""
    suffix = path.suffix.lower()
    return "CSV" if suffix in DELIMITERS else "JSON lines" if suffix in LINE_SUFFIXES else "Parquet"


def files_below(folder: Path) -> list[Path]:
    """Returns the files of a folder and of its sub-folders, in the order of their paths.

    Names that begin with `.` or `_` are left out: writers of parts mean them for themselves, such
    as `_SUCCESS`. A link to a folder counts as a file, so that no circle of links is followed.
    """
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    parts = {path.relative_to(folder).as_posix(): path for path in found}
    return [parts[name] for name in sorted(parts) if not re.search(r"(^|/)[._]", name)]


def folder_columns(path: Path) -> list[str]:
    """Returns the columns that names of sub-folders have, as in `day=2026-11-01/part-0.parquet`."""
    if not path.is_dir():
        return []
    names = (name for file in files_below(path) for name in file.relative_to(path).parent.parts)
    return sorted({name.partition("=")[0] for name in names if "=" in name})


def part_paths(path: Path) -> list[Path]:
    """Returns a file, or the files of a folder of parts and of its sub-folders, in a fixed order.

    Raises:
        SchemaError: If a file is missing, too large or of another kind, or if a folder has none or
            files of several kinds, or event logs in its sub-folders.
    """
    paths = [path]
    if path.is_dir():
        paths = files_below(path)
        if not paths:
            raise SchemaError(
                f"{path}: is an empty folder; expected parts of Parquet, CSV or JSON lines, or "
                "an event log"
            )
    for folder in dict.fromkeys(one.parent for one in paths if path not in (one, one.parent)):
        if is_event_log(folder):
            raise SchemaError(
                f"{folder}: is an event log inside a folder of parts; name each event log by itself"
            )
    for one in paths:
        if not one.is_file():
            reason = "is a link to a folder; expected a file" if one.is_dir() else "no such file"
            raise SchemaError(f"{one}: {reason}")
        suffix = one.suffix.lower()
        if suffix in FOREIGN:
            raise SchemaError(f"{one}: expected Parquet, CSV or JSON lines; {FOREIGN[suffix]}")
        if kind_of(one) != "Parquet" and one.stat().st_size > MAX_TABLE_BYTES:
            raise SchemaError(f"{one}: {one.stat().st_size} bytes; at most {MAX_TABLE_BYTES}")
        if kind_of(one) != kind_of(paths[0]):
            raise SchemaError(
                f"{path}: has parts of several kinds: {name_beside(paths[0], one)} is "
                f"{kind_of(paths[0])}, {name_beside(one, paths[0])} is {kind_of(one)}; expected "
                "one kind"
            )
    return paths


def read_blocks(path: Path, rows: int | None) -> Iterator[Block]:
    """Yields the rows of a file, or of the parts of a folder, as they were read.

    Args:
        path: The file of Parquet, CSV or JSON lines, or the folder.
        rows: Rows of a block of Parquet; a block of text has a number of bytes or lines. None: a
            block has a whole file.

    Raises:
        SchemaError: If a file is missing, unreadable or too large, or if parts have other columns.
    """
    paths = part_paths(path)
    kind = kind_of(paths[0])
    if len(paths) > 1 and kind != "Parquet":
        paths = [one for one in paths if one.stat().st_size] or paths[:1]
    if kind == "JSON lines":
        for one in paths:
            yield from read_line_blocks(one, rows is None)
        return
    schema = _joint_schema(paths) if kind == "Parquet" and path.is_dir() else None
    delimiter = find_delimiter(paths[0]) if kind == "CSV" else ""
    names: list[str] = [] if schema is None else schema.names
    for one in paths:
        blocks = (
            read_csv_blocks(one, delimiter, rows is None)
            if kind == "CSV"
            else _table_blocks(one, rows, schema)
        )
        for block in blocks:
            assert block.table is not None
            given = block.table.column_names
            names = names or given
            if given != names:
                check_same_names(one, given, paths[0], names)
                block = replace(block, table=block.table.select(names))
            yield block


def check_same_names(path: Path, names: list[str], first: Path, expected: list[str]) -> None:
    """Raises SchemaError if a part has other columns than the first one."""
    other = [name for name in names if name not in expected]
    missing = [name for name in expected if name not in names]
    if other or missing:
        reasons = [f"lacks {list_names(missing)}"] if missing else []
        reasons += [f"has {list_names(other)}"] if other else []
        raise SchemaError(
            f"{path}: {' and '.join(reasons)}, unlike {name_beside(first, path)}; expected "
            "parts with the same columns"
        )


def _joint_schema(paths: Sequence[Path]) -> pa.Schema:
    """Returns the columns of the first part, with types that hold those of all parts."""
    joint: pa.Schema | None = None
    for path in paths:
        with parquet_errors(path), pq.ParquetFile(path) as file:
            check_parquet(file)
            schema = file.schema_arrow
        if joint is None:
            joint = schema
            continue
        check_same_names(path, schema.names, paths[0], joint.names)
        for place, field in enumerate(joint):
            kind = schema.field(field.name).type
            if kind == field.type:
                continue
            try:
                one = [pa.schema([pa.field("x", t)]) for t in (field.type, kind)]
                both = pa.unify_schemas(one, promote_options="permissive").field("x").type
            except (pa.ArrowException, NotImplementedError):
                raise SchemaError(
                    f"{path}: column {field.name} is {kind}, and {field.type} in parts before it; "
                    "expected parts with the same types"
                ) from None
            joint = joint.set(place, pa.field(field.name, both))
    assert joint is not None
    return joint


def _table_blocks(path: Path, rows: int | None, schema: pa.Schema | None) -> Iterator[Block]:
    """Yields the rows of a Parquet file, with the types of a schema."""
    first = 0
    for table in read_table_chunks(path, rows):
        for place, name in enumerate(table.column_names if schema is not None else ()):
            kind = schema.field(name).type  # type: ignore[union-attr]
            values = table.column(name)
            if values.type != kind:
                try:
                    table = table.set_column(place, name, values.cast(kind))
                except (pa.ArrowException, NotImplementedError) as error:
                    raise SchemaError(
                        f"{path}: column {name} is {values.type}, and {kind} in other parts, "
                        f"which cannot hold it ({error}); expected parts with the same types"
                    ) from None
        yield Block(path, first, table)
        first += table.num_rows


def content_of(path: Path, blocks: Iterable[Block], rename: Rename) -> Content:
    """Returns what blocks of `read_blocks` hold.

    Args:
        path: The file or folder.
        blocks: The blocks, at least one.
        rename: Returns our names of the columns, None for those to leave out.

    Raises:
        SchemaError: If columns cannot be named or have no type.
    """
    blocks = iter(blocks)
    first = next(blocks)
    if first.table is None:
        return lines_content(path, chain([first], blocks), rename)
    tables = [first, *blocks]
    if kind_of(first.path) == "CSV":
        return csv_content(tables, rename)
    table = pa.concat_tables([block.table for block in tables])
    try:
        ours = rename(table.column_names)
    except ValueError as error:
        raise SchemaError(f"{first.path}: {error}") from None
    return _parquet_content(first.path, table, ours, places_of(tables))


def read_input(path: Path, rename: Rename) -> Content:
    """Reads a file of Parquet, CSV or JSON lines, or the folder of its parts.

    Args:
        path: The file or folder.
        rename: Returns our names of the columns, None for those to leave out.

    Raises:
        SchemaError: If the file is missing, unreadable, too large or empty.
    """
    content = content_of(path, read_blocks(path, None), rename)
    check_rows(content.table, path)
    return content


def read_chunks(path: Path, rename: Rename, rows: int) -> Iterator[Content]:
    """Yields the rows of a file or folder in chunks; their types may differ.

    Args:
        path: The file, or the folder of its parts.
        rename: As of `read_input`.
        rows: As of `read_blocks`.

    Raises:
        SchemaError: If `read_input` would refuse the file, or if its rows can only be read
            together.
    """
    for block in read_blocks(path, rows):
        content = content_of(path, [block], rename)
        if not content.table.num_columns and any(line.strip() for _, line in block.lines):
            raise SchemaError("the lines have no fields")
        yield content


def _parquet_content(
    path: Path, table: pa.Table, ours: list[str | None], places: Places
) -> Content:
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
    return Content(pa.table(columns), tuple(unreadable), notes, places)


class InputTable:
    """The table of an input file, or of a folder with its parts.

    Attributes:
        path: Path of the file or folder.
        places: Where the rows come from.
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
        """Reads a file, or the folder of its parts.

        Args:
            path: Path of the file or folder.
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
        self.places = self._content.places or Places(((0, path, 0),))
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
            path, reason = explain(error, self.places.of)
            path = path or self._part_with_fault(name, convert)
            self.problems.append(f"{path}: column {self.label(name)} {reason}")
            return default
        self.uses[name] = f"{use}; {note}" if note else use
        return values

    def _part_with_fault(self, name: str, convert: Convert[T]) -> Path:
        """Returns the first part whose column is refused by itself; the folder if none is."""
        column, runs = self.table.column(name), self.places.runs
        ends = [*(first for first, _, _ in runs[1:]), len(self)]
        for (first, path, _), end in zip(runs, ends, strict=True):
            try:
                convert(column.slice(first, end - first))
            except SchemaError:
                return path
        return self.path

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
        # Parts have the names of the first one; JSON lines may have others in each line.
        first = self.places.runs[0][1]
        path = self.path if kind_of(first) == "JSON lines" else first
        self.problems.append(
            f"{path}: column {wanted} is missing; the file has {list_names(there)}{hint}"
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
        there = {one.name for one in uses}
        for name in folder_columns(self.path):
            if name not in there:
                uses.append(ColumnUse(name, "name of folders", "ignored: no file has the column"))
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
        if has_long_integers(values):
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


def has_long_integers(values: pa.ChunkedArray) -> bool:
    """Whether a column has integers that doubles may round."""
    return bool(values.type == pa.int64() and (pc.max(pc.abs(values)).as_py() or 0) >= SHORT_NUMBER)


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
