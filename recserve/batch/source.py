"""Divides input files into partitions, and reads the rows of a partition in small tables.

A partition is a run of at most `rows_per_part` rows of one file. Its place in the sorted list of
files gives its number, and so the name of its output. Parquet files are read by row groups, JSON
lines by byte ranges. No file is ever in memory as a whole.
"""

from __future__ import annotations

import hashlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.features.tables.column_names import rename_columns
from recserve.features.tables.input_table import files_below
from recserve.features.tables.parquet import SchemaError
from recserve.features.tables.plain_columns import check_parquet

LINE_SUFFIXES = (".jsonl", ".ndjson")
LINE = "line"
LINES = pa.schema([pa.field(LINE, pa.large_binary(), nullable=False)])
MAX_LINE_BYTES = 1 << 20  # a longer line is cut, and its row is rejected
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Partition:
    """Rows of one input file that become one output file.

    Attributes:
        number: Number of the partition in the job, from 0.
        path: Absolute path of the input file.
        input: Name of the file, relative to the input folder.
        first_row: Row of the file at which the partition begins.
        rows: Number of rows, at least 1.
        first_byte: Place of the first row in a file of JSON lines.
        columns: Names of columns in the file by our name.
    """

    number: int
    path: str
    input: str
    first_row: int
    rows: int
    first_byte: int = 0
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Name of the output file without its suffix."""
        return f"part-{self.number:05d}"


@dataclass(frozen=True)
class InputFile:
    """One input file.

    Attributes:
        path: Path of the file.
        name: Path relative to the input folder, or the name of the file.
        sha256: Hash of the content, 64 hex digits.
        num_rows: Number of rows.
        starts: Place of the first row of each partition in a file of JSON lines; else empty.
        schema: Arrow schema, with our names.
        columns: Names of columns in the file by our name.
    """

    path: Path
    name: str
    sha256: str
    num_rows: int
    starts: tuple[int, ...]
    schema: pa.Schema
    columns: Mapping[str, str] = field(default_factory=dict)


def is_lines(path: Path) -> bool:
    """Returns whether a file holds JSON lines, by its suffix."""
    return path.suffix in LINE_SUFFIXES


def input_paths(source: Path) -> list[Path]:
    """Returns the input files in the order of `files_below`.

    Args:
        source: A file, or a folder of Parquet files or of JSON lines.

    Raises:
        SchemaError: If there is no file, or the folder mixes formats.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise SchemaError(f"{source}: no such file")
    found = [
        path
        for path in files_below(source)
        if path.suffix in (".parquet", *LINE_SUFFIXES) and path.is_file()
    ]
    if not found:
        raise SchemaError(f"{source}: no .parquet or .jsonl files in this folder")
    if len({is_lines(path) for path in found}) > 1:
        raise SchemaError(f"{source}: the folder has .parquet and .jsonl files; expected one kind")
    return found


class _LineId(msgspec.Struct):
    """The field of a line that names its request."""

    custom_id: Any = None


_LINE_ID = msgspec.json.Decoder(_LineId)
PlacedIds = Iterator[tuple[str, str]]


def check_lines(files: Sequence[InputFile]) -> tuple[str, ...]:
    """Checks files of lines, which have no columns to ignore.

    Raises:
        SchemaError: If a file holds no lines, or two lines have the same `custom_id`.
    """
    for file in files:
        if not is_lines(file.path):
            raise SchemaError(f"{file.path}: expected a name that ends with {LINE_SUFFIXES[0]}")
    check_unique(lambda: _line_ids(files))
    return ()


def _line_ids(files: Sequence[InputFile]) -> PlacedIds:
    """Yields the `custom_id` of each line that has one, and where the line is."""
    for file in files:
        with file.path.open("rb") as lines:
            for number in range(1, file.num_rows + 1):
                try:
                    given = _LINE_ID.decode(_line(lines).removeprefix(BOM_UTF8)).custom_id
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue  # a blank line, or one that the job rejects
                if isinstance(given, str):
                    yield given, f"{file.path}: line {number}"


def check_unique(ids: Callable[[], PlacedIds]) -> None:
    """Checks that no two requests of a job have the same id, which would mix up their answers.

    Args:
        ids: Returns all ids with their places; called a second time where an id may be repeated.

    Raises:
        SchemaError: If an id is repeated. The message names both places.
    """
    # Eight bytes for each id: a job may have many.
    hashes = np.asarray(array("q", (hash(one) for one, _ in ids())))
    values, counts = np.unique(hashes, return_counts=True)
    suspects = set(values[counts > 1].tolist())
    if not suspects:
        return
    first: dict[str, str] = {}
    repeated = ""
    count = 0
    for one, place in ids():
        if hash(one) not in suspects:
            continue
        if one in first:
            count += 1
            repeated = repeated or f"{place}: custom_id {one[:60]!r} is that of {first[one]}"
        else:
            first[one] = place
    if count:
        raise SchemaError(f"{repeated}; expected another one for each request ({count} repeated)")


def scan(
    source: Path, rows_per_part: int, columns: Mapping[str, str] | None = None
) -> list[InputFile]:
    """Counts the rows of all input files and hashes their contents.

    Args:
        source: File or folder.
        rows_per_part: Most rows of a partition.
        columns: Names of columns in the files by our name.

    Raises:
        SchemaError: If a file is unreadable, or no file has a row.
    """
    files = []
    for path in input_paths(source):
        name = path.name if path == source else path.relative_to(source).as_posix()
        files.append(
            _lines_file(path, name, rows_per_part)
            if is_lines(path)
            else _table(path, name, columns or {})
        )
    if not any(file.num_rows for file in files):
        raise SchemaError(f"{source}: the input has no rows; expected at least one")
    return files


def partitions(files: Sequence[InputFile], rows_per_part: int) -> list[Partition]:
    """Returns the partitions of all files in input order; none crosses the end of a file."""
    found: list[Partition] = []
    for file in files:
        firsts = range(0, file.num_rows, rows_per_part)
        for place, (first, end) in enumerate(pairwise([*firsts, file.num_rows])):
            found.append(
                Partition(
                    number=len(found),
                    path=str(file.path.resolve()),
                    input=file.name,
                    first_row=first,
                    rows=end - first,
                    first_byte=file.starts[place] if file.starts else 0,
                    columns=file.columns,
                )
            )
    return found


def read(partition: Partition, group_rows: int, columns: Iterable[str]) -> Iterator[pa.Table]:
    """Yields the rows of a partition in tables of `group_rows` rows; the last may be shorter.

    Args:
        partition: The partition.
        group_rows: Rows of a table, at least 1.
        columns: Names of the columns to read; others and missing ones are left out.
    """
    if is_lines(Path(partition.path)):
        yield from _read_lines(partition, group_rows)
        return
    with pq.ParquetFile(partition.path, buffer_size=READ_BYTES) as file:
        groups, skip = _row_groups(file.metadata, partition)
        batches = _batches(file, partition.columns, columns, groups, group_rows)
        yield from _regroup(batches, skip, partition.rows, group_rows)


def read_columns(file: InputFile, columns: Iterable[str]) -> Iterator[pa.Table]:
    """Yields all rows of a Parquet file in tables with some of its columns."""
    with pq.ParquetFile(file.path) as opened:
        groups = list(range(opened.metadata.num_row_groups))
        for batch in _batches(opened, file.columns, columns, groups, 65_536):
            yield pa.Table.from_batches([batch])


def _batches(
    file: pq.ParquetFile,
    names: Mapping[str, str],
    columns: Iterable[str],
    groups: list[int],
    rows: int,
) -> Iterator[pa.RecordBatch]:
    """Yields batches of the columns with our names."""
    there = file.schema_arrow.names
    wanted = set(columns)
    own = {
        given: ours
        for given, ours in zip(there, rename_columns(there, names), strict=True)
        if ours in wanted
    }
    for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=list(own)):
        yield batch.rename_columns([own[name] for name in batch.schema.names])


def _table(path: Path, name: str, columns: Mapping[str, str]) -> InputFile:
    try:
        with pq.ParquetFile(path) as file:
            check_parquet(file)
            schema, rows = file.schema_arrow, file.metadata.num_rows
            ours = rename_columns(schema.names, columns)
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(
            f"{path}: not a readable Parquet file ({error}); files of JSON lines end with "
            f"{' or '.join(LINE_SUFFIXES)} and are not compressed"
        ) from error
    except ValueError as error:
        raise SchemaError(f"{path}: {error}") from None
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    fields = [one.with_name(own) for one, own in zip(schema, ours, strict=True) if own is not None]
    return InputFile(path, name, sha256, rows, (), pa.schema(fields), columns)


def _lines_file(path: Path, name: str, rows_per_part: int) -> InputFile:
    """Counts the lines of a file and notes where each partition begins."""
    digest, rows, place, starts = hashlib.sha256(), 0, 0, []
    fresh = True  # the next byte begins a line
    with path.open("rb") as file:
        while piece := file.readline(READ_BYTES):
            if fresh:
                if rows % rows_per_part == 0:
                    starts.append(place)
                rows += 1
            digest.update(piece)
            place += len(piece)
            fresh = piece.endswith(b"\n")
    return InputFile(path, name, digest.hexdigest(), rows, tuple(starts), LINES)


def _read_lines(partition: Partition, group_rows: int) -> Iterator[pa.Table]:
    with open(partition.path, "rb") as file:
        file.seek(partition.first_byte)
        left = partition.rows
        while left:
            count = min(left, group_rows)
            lines = [_line(file) for _ in range(count)]
            yield pa.Table.from_arrays([pa.array(lines, pa.large_binary())], schema=LINES)
            left -= count


def _line(file: IO[bytes]) -> bytes:
    """Returns the next line; of a line that is too long only the first part."""
    line = file.readline(MAX_LINE_BYTES + 1)
    piece = line
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(READ_BYTES)
    return line


def _row_groups(metadata: pq.FileMetaData, partition: Partition) -> tuple[list[int], int]:
    """Returns the row groups that overlap a partition, and how many of their rows precede it."""
    groups: list[int] = []
    skip = first = 0
    end = partition.first_row + partition.rows
    for group in range(metadata.num_row_groups):
        last = first + metadata.row_group(group).num_rows
        if first < end and last > partition.first_row:
            if not groups:
                skip = partition.first_row - first
            groups.append(group)
        first = last
    return groups, skip


def _regroup(
    batches: Iterable[pa.RecordBatch], skip: int, rows: int, group_rows: int
) -> Iterator[pa.Table]:
    """Yields tables of `group_rows` rows of a stream, after `skip` rows and up to `rows` rows."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        ahead = min(skip, batch.num_rows)
        batch = batch.slice(ahead, rows)
        skip, rows = skip - ahead, rows - batch.num_rows
        # A batch can end in the middle of a group: its rest waits for the next batch.
        while held + batch.num_rows >= group_rows:
            need = group_rows - held
            yield pa.Table.from_batches([*waiting, batch.slice(0, need)])
            batch, waiting, held = batch.slice(need), [], 0
        if batch.num_rows:
            waiting.append(batch)
            held += batch.num_rows
        if not rows:
            break
    if held:
        yield pa.Table.from_batches(waiting)
