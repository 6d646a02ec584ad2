"""Reads events that do not fit into memory, with the checks and the result of a reading at once.

    files  -> chunks of rows: columns converted, rows checked by themselves (event_rows.py)
    chunks -> buckets of users on disk
    bucket -> repeats and versions dropped, the rest sorted by user and time, on disk
    bucket -> mapped arrays, with users numbered by their first row

All checks that compare rows compare those of one user. So they are the same functions as for a
table in memory, on one bucket after another. A file whose chunks do not tell the types of its
columns is read at once, as one chunk: such as a CSV file in which a number is text far below.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.features.tables.buckets import Buckets
from recserve.features.tables.column_names import rename_columns
from recserve.features.tables.event_files import (
    event_file_paths,
    is_event_log,
    read_event_chunks,
)
from recserve.features.tables.event_rows import (
    COLUMNS,
    IDS,
    EventRows,
    OpenedPart,
    check_chunk,
    check_type_count,
    find_superseded,
    join_reports,
    order_back,
    repeats,
)
from recserve.features.tables.events import EventLog
from recserve.features.tables.input_table import (
    SHARED,
    ChunkedInput,
    InputTable,
    MixedChunksError,
    content_of,
    has_long_integers,
    kind_of,
    part_paths,
    read_blocks,
    read_chunks,
)
from recserve.features.tables.items import ItemTable
from recserve.features.tables.mapped_arrays import new_array
from recserve.features.tables.parquet import (
    MAX_EXAMPLES,
    BadRows,
    ChunkedRowCheck,
    OnBadRows,
    SchemaError,
    check_rows,
)
from recserve.features.tables.text_files import Block, Content, LineError

ROWS_IN_MEMORY = 4_000_000  # of all files; a reading at once takes about 500 bytes for each
CHUNK_ROWS = 1 << 19
BUCKET_ROWS = 1 << 21
MAX_BUCKETS = 256
BYTES_OF_LINE = 32  # of a row of text, at least
NOTHING = ItemTable([], [], [], pa.table({}))  # for what depends on columns only
# What chunks that do not fit each other, or a file that is refused, may raise.
UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, KeyError)
SPILLED = pa.schema(
    [
        ("row", pa.int64()),  # among the rows of all files; -1 for a removal
        ("file", pa.int32()),
        ("user", pa.int32()),
        ("item", pa.int32()),
        ("time", pa.int64()),
        ("position", pa.int64()),
        ("type", pa.int32()),
        ("value", pa.float32()),
        ("key", pa.uint64()),
        ("received", pa.int64()),
    ]
)
SORTED = pa.schema([SPILLED.field(name) for name in ("user", "item", "time", "type", "value")])
Arrays = dict[str, np.ndarray]


_Chunks = Callable[[Path], Iterator[tuple[OpenedPart, ChunkedInput | None]]]


def num_rows_about(paths: Sequence[Path]) -> int:
    """Returns the number of rows of files and logs, of text at most; 0 for one that is refused."""
    total = 0
    for path in paths:
        try:
            files = event_file_paths(path) if is_event_log(path) else part_paths(path)
            for file in files:
                if kind_of(file) == "Parquet":
                    total += pq.read_metadata(file).num_rows
                else:
                    total += file.stat().st_size // BYTES_OF_LINE
        except (pa.ArrowException, OSError, ValueError):
            continue
    return total


def read_large_events(
    paths: Sequence[Path],
    names: Mapping[str, str],
    items: ItemTable,
    on_bad_rows: OnBadRows,
    valued: Collection[str],
) -> tuple[EventLog, BadRows]:
    """Reads events as `event_table.read_events`, whose result is the same.

    Args:
        paths: Files and folders of event logs.
        names: Names of columns in a file by our name.
        items: Items that events may refer to.
        on_bad_rows: As of `read_events`.
        valued: As of `read_events`.

    Raises:
        SchemaError: As of `read_events`.
        BadRowError: As of `read_events`.
    """
    num_buckets = min(max(-(-num_rows_about(paths) // BUCKET_ROWS), 1), MAX_BUCKETS)
    with tempfile.TemporaryDirectory() as folder:
        spilled = Buckets(Path(folder), "rows", num_buckets, SPILLED)
        joins = len(paths) > 1 or is_event_log(paths[0])
        reading = _Reading(names, items, on_bad_rows, valued, spilled, joins)
        for path in paths:
            reading.read(path)
            if reading.must_stop:
                break
        return _Joining(reading).join(Path(folder))


def check_columns_of(path: Path, names: Mapping[str, str]) -> None:
    """Raises SchemaError if a file's columns cannot be used, whatever the items are."""
    whole = ChunkedInput(path, COLUMNS, names)
    try:
        for content in read_chunks(path, whole.rename, CHUNK_ROWS):
            if content.table.num_rows:
                EventRows.of(whole.chunk(content), NOTHING)
        if whole.types:
            return
    except UNREADABLE:
        pass
    find_refusal(path, names)
    EventRows.of(InputTable(path, COLUMNS, names), NOTHING)


def find_refusal(path: Path, names: Mapping[str, str]) -> None:
    """Raises the SchemaError with which a reading at once would refuse a file, in most cases.

    Of the file's blocks only those stay in memory that say something new of a column: its type, how
    it was converted, or why it cannot be. Together they are refused as the file is.
    """

    def rename(given: list[str]) -> list[str | None]:
        return rename_columns(given, names, SHARED)

    seen, kept = set[Any](), list[Block]()
    for block in read_blocks(path, CHUNK_ROWS):
        signs = set[Any]()
        try:
            source = InputTable(path, COLUMNS, names, content_of(path, [block], rename))
        except LineError:
            raise
        except SchemaError as error:
            signs.add(_form(error))
        else:
            signs |= _signs(source)
        if signs - seen:
            kept.append(block)
            seen |= signs
    content = content_of(path, kept, rename) if kept else Content(pa.table({}))
    check_rows(content.table, path)
    EventRows.of(InputTable(path, COLUMNS, names, content), NOTHING)


def _signs(source: InputTable) -> set[Any]:
    """Returns what a block says of its columns."""
    with contextlib.suppress(SchemaError):
        EventRows.of(source, NOTHING)
    signs: set[Any] = {_form(problem) for problem in source.problems}
    for name in source.table.column_names:
        values = source.table.column(name)
        signs.add((name, str(values.type), source.has(name), has_long_integers(values)))
        signs.add((name, source.uses.get(name)))
    return signs


def _form(message: object) -> str:
    """Returns a message without its examples."""
    return re.sub(r"'[^']*'|[0-9]+", "", str(message))


@dataclass
class _File:
    """One of the files.

    Attributes:
        number: Number of the file in the buckets; a file that is read again has a new one.
        check: Its rejected rows.
        is_log: Whether it is an event log.
        first_row: Rows of all files before its first.
        clock: Name of the column that orders its events.
        whole: The table's columns without rows; None for a log.
        num_kept: Rows that are not rejected.
        num_back: Rows that are older than the row before of their user.
        repeated: The first repeated rows of each kind, with their number.
    """

    number: int
    check: ChunkedRowCheck
    is_log: bool
    first_row: int
    clock: str = ""
    whole: InputTable | None = None
    num_kept: int = 0
    num_back: int = 0
    repeated: dict[str, _Repeated] = field(default_factory=dict)


@dataclass
class _Repeated:
    """Rows that repeat earlier ones: how many, and columns of the first of them."""

    count: int = 0
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, found: Arrays) -> None:
        """Adds the repeated rows of a bucket."""
        self.count += found["row"].size
        columns = (
            found[name][:MAX_EXAMPLES].tolist() for name in ("row", "user", "item", "position")
        )
        self.rows = sorted([*self.rows, *zip(*columns, strict=True)])[:MAX_EXAMPLES]


class _Reading:
    """Reads files in chunks into buckets of users."""

    def __init__(
        self,
        names: Mapping[str, str],
        items: ItemTable,
        on_bad_rows: OnBadRows,
        valued: Collection[str],
        spilled: Buckets,
        joins: bool,
    ) -> None:
        self.joins = joins
        self.names, self.items, self.on_bad_rows, self.valued = names, items, on_bad_rows, valued
        self.spilled = spilled
        self.files: list[_File] = []
        self.refusal: SchemaError | None = None
        self.users: dict[str, int] = {}
        self.types: dict[str, int] = {}
        self._num_files = 0
        self._num_rows = 0

    @property
    def must_stop(self) -> bool:
        """Whether a file is refused, so that later ones are not read."""
        refuses = self.on_bad_rows == "error" and self.files and self.files[-1].check.num_refused
        return self.refusal is not None or bool(refuses)

    def read(self, path: Path) -> None:
        """Reads a file or a log, in chunks if it can be, and notes why it is refused."""
        try:
            file = self._read(path, self._log_chunks if is_event_log(path) else self._file_chunks)
        except UNREADABLE:
            try:
                if not is_event_log(path):
                    find_refusal(path, self.names)
                file = self._read(path, self._at_once)
            except SchemaError as error:
                self.refusal = error
                return
        self.files.append(file)

    def _log_chunks(self, path: Path) -> Iterator[tuple[OpenedPart, ChunkedInput]]:
        whole = ChunkedInput(path, COLUMNS, {})
        for table in read_event_chunks(path):
            for first in range(0, table.num_rows, CHUNK_ROWS):
                yield OpenedPart.of_log(table.slice(first, CHUNK_ROWS), whole.chunk), whole

    def _file_chunks(self, path: Path) -> Iterator[tuple[OpenedPart, ChunkedInput]]:
        whole = ChunkedInput(path, COLUMNS, self.names)
        for content in read_chunks(path, whole.rename, CHUNK_ROWS):
            if content.table.num_rows:
                yield OpenedPart.of_source(whole.chunk(content), self.joins), whole

    def _at_once(self, path: Path) -> Iterator[tuple[OpenedPart, None]]:
        yield OpenedPart.of(path, self.names, self.joins), None

    def _read(self, path: Path, chunks: _Chunks) -> _File:
        number, self._num_files = self._num_files, self._num_files + 1
        check = ChunkedRowCheck(path, self.on_bad_rows)
        file = _File(number, check, is_event_log(path), self._num_rows)
        whole, type_names = None, set[str]()
        for part, whole in chunks(path):
            if len(part.source) or whole is None:
                rows = EventRows.of(part.source, self.items)
                if file.clock not in ("", rows.clock):
                    raise MixedChunksError(f"{file.clock} and {rows.clock}")
                file.clock = rows.clock
                type_names.update(rows.type_names)
                check_type_count(path, type_names)
                file.check.begin(len(part.source), part.source.labels, part.source.places)
                check_chunk(rows, file.check, part.source, self.valued)
                self._spill_rows(number, part, rows, file.check.kept)
                if whole is None:
                    file.whole = part.source
            self._spill_removals(number, part)
        if not file.clock:
            raise MixedChunksError("no chunk has rows")
        if whole is not None:
            file.whole = _whole_table(whole, self.joins)
        return file

    def _spill_rows(
        self, number: int, part: OpenedPart, rows: EventRows, accepted: np.ndarray
    ) -> None:
        kept = np.flatnonzero(accepted)
        codes = [self.types.setdefault(name, len(self.types)) for name in rows.type_names]
        users = self._number_users(rows.users.take(pa.array(kept)))
        columns = {
            "row": self._num_rows + kept,
            "file": np.full(kept.size, number),
            "user": users,
            "item": rows.item_rows[kept],
            "time": rows.times.values[kept],
            "position": rows.positions.values[kept],
            "type": np.array(codes, np.int32)[rows.types[kept]],
            "value": rows.values[kept],
            "key": part.keys[kept],
            "received": part.received[kept],
        }
        self.spilled.add(_table(columns, SPILLED), users % self.spilled.number)
        self._num_rows += accepted.size

    def _spill_removals(self, number: int, part: OpenedPart) -> None:
        users = self._number_users(part.removed)
        if users.size:
            columns = {one.name: np.zeros(users.size, np.int64) for one in SPILLED}
            columns |= {"row": columns["row"] - 1, "file": columns["file"] + number}
            columns |= {"user": users, "key": part.removed_keys, "received": part.removed_at}
            self.spilled.add(_table(columns, SPILLED), users % self.spilled.number)

    def _number_users(self, ids: pa.Array) -> np.ndarray:
        """Returns [n] int64 numbers of users, new ones for new users."""
        coded, known = ids.dictionary_encode(), self.users
        numbers = [known.setdefault(one, len(known)) for one in coded.dictionary.to_pylist()]
        table = np.array([*numbers, 0], np.int64)
        return np.asarray(table[coded.indices.fill_null(len(numbers)).to_numpy()])


class _Joining:
    """Joins the buckets into an event log."""

    def __init__(self, reading: _Reading) -> None:
        self.reading, self.joins, self.user_ids = reading, reading.joins, list(reading.users)
        self.files = reading.files
        self.num_versions = self.num_again = 0
        # By user, with the number that reading gave: events, and the first row.
        self.counts = np.zeros(len(reading.users), np.int64)
        self.first_rows = np.zeros(len(reading.users), np.int64)
        self.used_types = np.zeros(len(reading.types), bool)

    def join(self, folder: Path) -> tuple[EventLog, BadRows]:
        """Returns the events and the report. Raises as `read_large_events`."""
        if not self.files and self.reading.refusal is not None:
            raise self.reading.refusal
        spilled = self.reading.spilled
        done = Buckets(folder, "sorted", spilled.number, SORTED)
        for bucket in range(spilled.number):
            columns = self._sort(_arrays(spilled.take(bucket)))
            done.add(_table(columns, SORTED), np.full(columns["user"].size, bucket))
        report = self._report()
        return self._log(done), report

    def _sort(self, columns: Arrays) -> Arrays:
        """Drops repeated and replaced events of a bucket, and sorts it by user and time."""
        size = 1 + max((file.number for file in self.files), default=-1)
        lives, is_log, has_positions = np.zeros((3, size + 1), bool)
        for file in self.files:
            lives[file.number] = True
            is_log[file.number] = file.is_log
            has_positions[file.number] = file.clock == "position"
        # A file that was read again has rows with its earlier number.
        live = lives[columns["file"].clip(max=size)]
        removed = columns["row"] < 0
        gone = {name: values[live & removed] for name, values in columns.items()}
        columns = {name: values[live & ~removed] for name, values in columns.items()}
        files = columns["file"]
        ordered = np.where(has_positions[files], columns["position"], columns["time"])
        identity = (columns["user"], columns["item"], ordered, columns["type"])
        kept = self._without_repeats(columns, identity, ~is_log[files], has_positions[files])
        columns = {name: values[kept] for name, values in columns.items()}
        identity = tuple(one[kept] for one in identity)
        ordered, users = ordered[kept], columns["user"]
        numbers = np.bincount(columns["file"], minlength=size)
        for file in self.files:
            file.num_kept += int(numbers[file.number])
        if self.joins:
            every = {n: np.concatenate([columns[n], gone[n]]) for n in ("user", "key", "received")}
            old = find_superseded(every["user"], every["key"], every["received"], users.size)
            again = repeats(identity, ~old)
            self.num_versions += int(old.sum())
            self.num_again += int(again.sum())
            chosen = np.flatnonzero(~old & ~again)
            columns = {name: values[chosen] for name, values in columns.items()}
            ordered, users = ordered[chosen], columns["user"]
        elif users.size:
            self.files[0].num_back += order_back(users, columns["time"], columns["position"])
        found, first, counts = np.unique(users, return_index=True, return_counts=True)
        self.first_rows[found], self.counts[found] = columns["row"][first], counts
        self.used_types[columns["type"]] = True
        order = np.lexsort((columns["position"], columns["time"], users))
        columns["time"] = ordered
        return {name: columns[name][order] for name in SORTED.names}

    def _without_repeats(
        self,
        columns: Arrays,
        identity: tuple[np.ndarray, ...],
        unique: np.ndarray,
        has_positions: np.ndarray,
    ) -> np.ndarray:
        """Returns [n] bool: False for rows that repeat earlier ones of their file, which it notes.

        Args:
            columns: The rows.
            identity: What equal rows have in common, beside their file.
            unique: [n] whether a row may not repeat another one.
            has_positions: [n] whether positions order the events of a row's file.
        """
        kept = np.ones(unique.size, bool)
        for kind, keys, judged in (
            ("event", identity, unique),
            ("position", (columns["user"], columns["position"]), unique & has_positions),
        ):
            again = repeats((columns["file"], *keys), judged & kept)
            kept &= ~again
            places = np.flatnonzero(again)
            for file in self.files if places.size else ():
                own = places[columns["file"][places] == file.number]
                if own.size:
                    noted = file.repeated.setdefault(kind, _Repeated())
                    noted.add({name: values[own] for name, values in columns.items()})
        return kept

    def _report(self) -> BadRows:
        """Returns the report of all files. Raises SchemaError or BadRowError."""
        reports = []
        for file in self.files:
            self._refuse_repeats(file)
            source, check = file.whole, file.check
            assert source is not None
            check.close(source.table.column_names)
            if not self.joins or (self.reading.on_bad_rows == "error" and check.num_rows):
                check.finish()
            if not self.joins:
                check.note(f"rows out of {file.clock} order, sorted", file.num_back)
            reports.append(check.report(() if file.is_log else source.columns()))
        if self.reading.refusal is not None:
            raise self.reading.refusal
        if not self.joins:
            return reports[0]
        return join_reports(
            reports,
            [(file.clock, file.num_kept) for file in self.files],
            int(self.counts.sum()),
            self.num_versions,
            self.num_again,
        )

    def _refuse_repeats(self, file: _File) -> None:
        """Rejects the rows that repeat earlier ones of a file."""
        ids = self.reading.items.ids
        for kind, noted in sorted(file.repeated.items()):
            texts = [
                f"user {self.user_ids[user]!r} already has "
                + (
                    f"item {ids[item]!r} at this {file.clock}"
                    if kind == "event"
                    else f"position {position}"
                )
                for _, user, item, position in noted.rows
            ]
            rows = [row - file.first_row for row, *_ in noted.rows]
            column = "item_id" if kind == "event" else file.clock
            file.check.refuse_later(noted.count, f"duplicate {kind}", column, rows, texts)

    def _log(self, done: Buckets) -> EventLog:
        """Returns the sorted buckets as one log, with users in the order of their first rows."""
        there = np.flatnonzero(self.counts)
        there = there[np.argsort(self.first_rows[there])]
        offsets = np.concatenate([[0], np.cumsum(self.counts[there])]).astype(np.int64)
        starts = np.zeros(self.counts.size, np.int64)
        starts[there] = offsets[:-1]
        used = [
            name
            for name, is_used in zip(self.reading.types, self.used_types, strict=True)
            if is_used
        ]
        type_names = tuple(sorted(used))
        check_type_count(", ".join(str(file.check.path) for file in self.files), type_names)
        number = {name: place for place, name in enumerate(type_names)}
        types = np.array([number.get(name, 0) for name in self.reading.types], np.int16)
        total = int(offsets[-1])
        log = EventLog(
            [self.user_ids[user] for user in there.tolist()],
            offsets,
            new_array(total, np.int32),
            new_array(total, np.int64),
            new_array(total, np.int16),
            type_names,
            new_array(total, np.float32),
            next(file.clock for file in self.files if file.num_kept) == "timestamp",
        )
        for bucket in range(done.number):
            columns = _arrays(done.take(bucket))
            found, first, counts = np.unique(columns["user"], return_index=True, return_counts=True)
            places = np.repeat(starts[found] - first, counts) + np.arange(columns["user"].size)
            log.item_rows[places] = columns["item"]
            log.times[places] = columns["time"]
            log.types[places] = types[columns["type"]]
            log.values[places] = columns["value"]
        return log


def _table(columns: Arrays, schema: pa.Schema) -> pa.Table:
    """Returns arrays as a table."""
    arrays = [
        pa.array(columns[one.name].astype(one.type.to_pandas_dtype(), copy=False)) for one in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _arrays(table: pa.Table) -> Arrays:
    """Returns the columns of a table."""
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _whole_table(whole: ChunkedInput, joins: bool) -> InputTable:
    """Returns the table without rows that says what the columns of a file in chunks became."""
    table = whole.empty()
    for name in table.table.column_names:
        if name not in COLUMNS:
            table.uses[name] = "not used" + table.suggestion(name)
    if "event_id" in whole.present:
        table.uses["event_id"] = IDS
    elif not joins:
        table.uses.pop("event_id", None)
    return table
