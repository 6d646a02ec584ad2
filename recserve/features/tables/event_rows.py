"""The rows of an event file as arrays, and the checks of every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.bounds import (
    MAX_ID_LENGTH,
    MAX_POSITION,
    MAX_TIME_US,
    MAX_USER_ID_BYTES,
    MAX_VALUE,
    MIN_TIME_US,
    TIMES,
)
from recserve.features.history.type_names import type_name_fault
from recserve.features.tables.conversions import (
    Times,
    convert_ids,
    convert_positions,
    convert_text,
    convert_times,
    convert_values,
    has_values,
    show_time,
)
from recserve.features.tables.event_files import (
    REMOVE,
    event_keys,
    is_event_log,
    read_event_files,
    received_us,
)
from recserve.features.tables.events import EventLog
from recserve.features.tables.input_table import InputTable
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import (
    BadRows,
    OnBadRows,
    RowCheck,
    SchemaError,
    longer_than,
    null_or_blank,
)
from recserve.features.tables.text_files import Content

DEFAULT_TYPE = "event"
COLUMNS = ("user_id", "item_id", "timestamp", "position", "type", "value", "event_id")
CLOCKS = ("timestamp", "position")
IDS = "ids that join events of several files"


def checked_rows(
    source: InputTable,
    items: ItemTable,
    on_bad_rows: OnBadRows,
    valued: Collection[str],
    versions: bool = False,
) -> tuple[EventRows, RowCheck]:
    """Returns the columns of a file, and which of its rows are valid.

    Args:
        source: The file.
        items: Items that events may refer to.
        on_bad_rows: As of `read_events`.
        valued: As of `read_events`.
        versions: Whether rows may be versions of one event, as in a log.
    """
    arrays = EventRows.of(source, items)
    check = RowCheck(source.path, len(source), on_bad_rows, source.labels, source.places)
    check_chunk(arrays, check, source, valued)
    if not versions:
        arrays.reject_repeats(check)
    return arrays, check


def check_chunk(
    rows: EventRows, check: RowCheck, source: InputTable, valued: Collection[str]
) -> None:
    """Rejects rows that are invalid by themselves; the arguments are as of `checked_rows`."""
    source.reject_unreadable(check, COLUMNS)
    if valued:
        rows.reject_missing_values(check, source, valued)
    rows.reject_invalid(check)


@dataclass(frozen=True)
class EventRows:
    """The n rows of an event file, as arrays.

    Attributes:
        users: [n] user ids.
        item_ids: [n] item ids.
        item_rows: [n] int32 item rows, -1 for an unknown item.
        types: [n] int16 index into `type_names`.
        type_names: Sorted names of the event types.
        values: [n] float64 values.
        times: Microseconds, zeros without the column.
        positions: Positions, zeros without the column.
        clock: Name of the column that orders a user's events.
    """

    users: pa.Array
    item_ids: pa.Array
    item_rows: np.ndarray
    types: np.ndarray
    type_names: tuple[str, ...]
    values: np.ndarray
    times: Times
    positions: Times
    clock: str

    @classmethod
    def of(cls, source: InputTable, items: ItemTable) -> EventRows:
        """Converts the columns. Raises SchemaError for missing and mistyped columns."""
        rows, texts = len(source), pa.large_string()
        users = source.require("user_id", convert_ids, "user ids", pa.nulls(rows, texts))
        item_ids = source.require("item_id", convert_ids, "item ids", pa.nulls(rows, texts))
        known = pc.index_in(item_ids, value_set=pa.array(items.ids, texts))
        times, positions, clock = _times(source)
        types, type_names = _types(source)
        values = source.convert("value", convert_values, "event values", np.ones(rows))
        if source.has("event_id"):
            source.uses["event_id"] = IDS
        for name in source.table.column_names:
            if name not in COLUMNS:
                source.uses[name] = "not used" + source.suggestion(name)
        source.check()
        return cls(
            users,
            item_ids,
            pc.fill_null(known, -1).to_numpy(zero_copy_only=False).astype(np.int32),
            types,
            type_names,
            values,
            times,
            positions,
            clock,
        )

    def take(self, rows: np.ndarray) -> EventRows:
        """Returns the given rows."""
        chosen = pa.array(rows)
        times, positions = (
            Times(one.values[rows], one.null[rows], one.given.take(chosen))
            for one in (self.times, self.positions)
        )
        return replace(
            self,
            users=self.users.take(chosen),
            item_ids=self.item_ids.take(chosen),
            item_rows=self.item_rows[rows],
            types=self.types[rows],
            values=self.values[rows],
            times=times,
            positions=positions,
        )

    @staticmethod
    def concat(parts: Sequence[EventRows]) -> EventRows:
        """Returns the rows of several files with one clock, one file after another."""
        names = tuple(sorted({name for part in parts for name in part.type_names}))
        numbers = [np.array([names.index(n) for n in part.type_names], np.int16) for part in parts]
        times, positions = (
            Times(
                np.concatenate([one.values for one in clocks]),
                np.concatenate([one.null for one in clocks]),
                pa.chunked_array([pa.nulls(sum(len(one.values) for one in clocks))]),
            )
            for clocks in zip(*((part.times, part.positions) for part in parts), strict=True)
        )
        return EventRows(
            pa.concat_arrays([part.users for part in parts]),
            pa.concat_arrays([part.item_ids for part in parts]),
            np.concatenate([part.item_rows for part in parts]),
            np.concatenate([n[part.types] for n, part in zip(numbers, parts, strict=True)]),
            names,
            np.concatenate([part.values for part in parts]),
            times,
            positions,
            parts[0].clock,
        )

    @property
    def order_by(self) -> Times:
        """The clock."""
        return self.times if self.clock == "timestamp" else self.positions

    def reject_missing_values(
        self, check: RowCheck, source: InputTable, types: Collection[str]
    ) -> None:
        """Rejects events of some types that have no value, which would count as 1."""
        given = np.zeros(len(source), dtype=bool)
        given = source.convert("value", has_values, source.uses.get("value", ""), given)
        needed = np.array([name in types for name in self.type_names], bool)[self.types]
        check.refuse(
            needed & ~given,
            "null value",
            "value",
            lambda r: f"events of type {self.type_names[self.types[r]]!r} need a value",
        )

    def reject_invalid(self, check: RowCheck) -> None:
        """Rejects rows that are invalid by themselves."""
        clock = self.clock
        for ids, name in ((self.users, "user_id"), (self.item_ids, "item_id")):
            blank = null_or_blank(ids)
            check.refuse(blank, f"null {name}", name, lambda r: "the id is null or empty")
        check.refuse(
            longer_than(self.users, MAX_ID_LENGTH),
            "long user_id",
            "user_id",
            lambda r: f"the id has more than {MAX_ID_LENGTH} characters",
        )
        bytes_ = pc.fill_null(pc.binary_length(self.users), 0).to_numpy(zero_copy_only=False)
        check.refuse(
            bytes_ > MAX_USER_ID_BYTES,
            "long user_id",
            "user_id",
            lambda r: f"the id has more than {MAX_USER_ID_BYTES} bytes of UTF-8",
        )
        check.refuse(
            self.item_rows < 0,
            "unknown item_id",
            "item_id",
            lambda r: f"{self.item_ids[r].as_py()!r} is not among the items",
        )
        given = self.order_by.given
        check.refuse(self.order_by.null, f"null {clock}", clock, lambda r: f"the {clock} is null")
        values = self.order_by.values
        if clock == "timestamp":
            least, most, bound = MIN_TIME_US, MAX_TIME_US - 1, TIMES
        else:
            least, most, bound = 0, MAX_POSITION, f"0 to {MAX_POSITION}"
        check.refuse(
            (values < least) | (values > most),
            f"{clock} out of range",
            clock,
            lambda r: f"it is {show_time(given[r])}; expected {bound}",
        )
        faults = [type_name_fault(name) for name in self.type_names]
        check.refuse(
            np.array([fault is not None for fault in faults], bool)[self.types],
            "invalid type",
            "type",
            lambda r: faults[self.types[r]] or "",
        )
        check.refuse(
            ~(np.abs(self.values) <= MAX_VALUE),
            "value not finite",
            "value",
            lambda r: f"it is {self.values[r]}; expected a finite 32-bit float",
        )

    def log(self, kept: np.ndarray) -> EventLog:
        """Returns the events of the given rows, with users numbered by first appearance."""
        left = self.users.take(pa.array(kept)).dictionary_encode()
        codes = left.indices.to_numpy(zero_copy_only=False)
        order = kept[np.lexsort((self.positions.values[kept], self.times.values[kept], codes))]
        counts = np.bincount(codes, minlength=len(left.dictionary))
        used, types = np.unique(self.types[order], return_inverse=True)
        return EventLog(
            left.dictionary.to_pylist(),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            self.item_rows[order],
            self.order_by.values[order],
            types.astype(np.int16),
            tuple(self.type_names[number] for number in used.tolist()),
            self.values[order].astype(np.float32),
            self.clock == "timestamp",
        )

    def reject_repeats(self, check: RowCheck) -> None:
        """Rejects valid rows that repeat earlier ones."""
        clock, users = self.clock, self.users
        user_codes = encode_kept(users, check.kept)
        check.refuse(
            repeats((user_codes, self.item_rows, self.order_by.values, self.types), check.kept),
            "duplicate event",
            "item_id",
            lambda r: (
                f"user {users[r].as_py()!r} already has item {self.item_ids[r].as_py()!r} "
                f"at this {clock}"
            ),
        )
        if clock == "position":
            check.refuse(
                repeats((user_codes, self.positions.values), check.kept),
                "duplicate position",
                clock,
                lambda r: (
                    f"user {users[r].as_py()!r} already has position {self.positions.values[r]}"
                ),
            )

    def num_unordered(self, kept: np.ndarray) -> int:
        """Returns how many of the given rows are older than their user's previous row."""
        users = encode_kept(self.users, np.ones(len(self.users), bool))[kept]
        return order_back(users, self.times.values[kept], self.positions.values[kept])


@dataclass(frozen=True)
class OpenedPart:
    """One of several files before its check, or a chunk of it; or an event log.

    Attributes:
        source: The rows, without removals.
        keys: [n] uint64 key of each event; 0 for an event without an id.
        received: [n] int64 time at which a server received the event; 0 for that of a file.
        removed: [m] users of the removed events.
        removed_keys: [m] uint64 keys of the removed events.
        removed_at: [m] int64 times at which a server received the removals.
    """

    source: InputTable
    keys: np.ndarray
    received: np.ndarray
    removed: pa.Array
    removed_keys: np.ndarray
    removed_at: np.ndarray

    @classmethod
    def of(cls, path: Path, names: Mapping[str, str], joins: bool = True) -> OpenedPart:
        """Opens a file, a folder of its parts, or that of an event log. Raises SchemaError."""
        if not is_event_log(path):
            return cls.of_source(InputTable(path, COLUMNS, names), joins)
        return cls.of_log(
            read_event_files(path), lambda content: InputTable(path, COLUMNS, content=content)
        )

    @classmethod
    def of_source(cls, source: InputTable, joins: bool = True) -> OpenedPart:
        """Returns the rows of a file, with the keys of their ids if they join several files."""
        texts = pa.large_string()
        keys = np.zeros(len(source), np.uint64)
        if joins:
            nulls = pa.nulls(len(source), texts)
            keys = event_keys(source.convert("event_id", convert_ids, IDS, nulls))
        nothing = pa.array([], texts), np.zeros(0, np.uint64), np.zeros(0, np.int64)
        return cls(source, keys, np.zeros(len(source), np.int64), *nothing)

    @classmethod
    def of_log(cls, table: pa.Table, make: Callable[[Content], InputTable]) -> OpenedPart:
        """Divides the rows of an event log into events and removals."""
        removes = pc.fill_null(pc.equal(table.column("correction"), REMOVE), False)
        lost, table = table.filter(removes), table.filter(pc.invert(removes))
        columns = table.select([name for name in COLUMNS if name in table.column_names])
        return cls(
            make(Content(columns)),
            table.column("event_key").to_numpy(),
            received_us(table),
            lost.column("user_id").cast(pa.large_string()).combine_chunks(),
            lost.column("event_key").to_numpy(),
            received_us(lost),
        )


@dataclass(frozen=True)
class EventPart:
    """The valid rows of one of several files, and the removals of an event log.

    Attributes:
        arrays: The valid rows.
        keys: [n] uint64 key of each event; 0 for an event without an id.
        received: [n] int64 time at which a server received the event; 0 for that of a file.
        removed: [m] users of the removed events.
        removed_keys: [m] uint64 keys of the removed events.
        removed_at: [m] int64 times at which a server received the removals.
        report: Report of the file.
    """

    arrays: EventRows
    keys: np.ndarray
    received: np.ndarray
    removed: pa.Array
    removed_keys: np.ndarray
    removed_at: np.ndarray
    report: BadRows

    @classmethod
    def of(
        cls,
        path: Path,
        names: Mapping[str, str],
        items: ItemTable,
        on_bad_rows: OnBadRows,
        valued: Collection[str],
    ) -> EventPart:
        """Reads a file, a folder of its parts, or an event log. Raises as `read_events`."""
        opened, is_log = OpenedPart.of(path, names), is_event_log(path)
        source, keys, received = opened.source, opened.keys, opened.received
        arrays, check = checked_rows(source, items, on_bad_rows, valued, is_log)
        # A log may hold removals only, and "skip" may leave nothing of a file.
        strict = on_bad_rows == "error" and len(source)
        kept = check.finish() if strict else np.flatnonzero(check.kept)
        report = check.report(() if is_log else source.columns())
        return cls(
            arrays.take(kept),
            keys[kept],
            received[kept],
            opened.removed,
            opened.removed_keys,
            opened.removed_at,
            report,
        )


def _times(source: InputTable) -> tuple[Times, Times, str]:
    """Returns times, positions and the name of the ordering column; zeros without a column."""
    rows = len(source)
    zeros = np.zeros(rows, dtype=np.int64)
    nothing = Times(zeros, np.ones(rows, dtype=bool), pa.chunked_array([pa.nulls(rows)]))
    if not any(source.has(name) for name in CLOCKS):
        there = [name for name in CLOCKS if name in source.table.column_names]
        if there:
            source.problems.append(f"{source.path}: column {there[0]} has no value in any row")
        else:
            source.miss("timestamp (timestamp) or position (integer)", CLOCKS)
    times = source.convert("timestamp", convert_times, "times", nothing)
    positions = source.convert("position", convert_positions, "positions", nothing)
    return times, positions, "timestamp" if source.has("timestamp") else "position"


def _types(source: InputTable) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns [n] int16 event types and their sorted names; a null type is "event"."""
    texts = pc.fill_null(
        source.convert(
            "type", convert_text, "event types", pa.nulls(len(source), pa.large_string())
        ),
        DEFAULT_TYPE,
    )
    names = sorted(texts.unique().to_pylist())
    try:
        check_type_count(source.path, names)
    except SchemaError as error:
        source.problems.append(str(error))
    codes = pc.index_in(texts, value_set=pa.array(names, pa.large_string()))
    return codes.to_numpy(zero_copy_only=False).astype(np.int16), tuple(names)


def check_type_count(file: object, names: Collection[str]) -> None:
    """Raises SchemaError if a file has too many types."""
    if len(names) > np.iinfo(np.int16).max:
        raise SchemaError(f"{file}: column type has {len(names)} distinct values; at most 32767")


def encode_kept(users: pa.Array, kept: np.ndarray) -> np.ndarray:
    """Returns [n] int64 user numbers, -1 for rejected rows."""
    codes = users.dictionary_encode().indices
    filled = pc.fill_null(codes, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.where(kept, filled, -1)


def repeats(keys: tuple[np.ndarray, ...], kept: np.ndarray) -> np.ndarray:
    """Returns [n] bool, True where a valid row equals an earlier valid row in all keys."""
    rows = np.flatnonzero(kept)
    columns = [key[rows] for key in keys]
    # A stable sort makes equal rows neighbours, the earliest first.
    order = np.lexsort(columns[::-1])
    same = np.ones(max(rows.size - 1, 0), dtype=bool)
    for values in columns:
        ranked = values[order]
        same &= ranked[1:] == ranked[:-1]
    repeated = np.zeros(kept.size, dtype=bool)
    repeated[rows[order[1:][same]]] = True
    return repeated


def order_back(users: np.ndarray, times: np.ndarray, positions: np.ndarray) -> int:
    """Returns how many of n rows are older than their user's previous row."""
    order = np.argsort(users, kind="stable")
    user, time, position = users[order], times[order], positions[order]
    back = (time[1:] < time[:-1]) | ((time[1:] == time[:-1]) & (position[1:] < position[:-1]))
    return int(np.count_nonzero(back & (user[1:] == user[:-1])))


def find_superseded(
    users: np.ndarray, keys: np.ndarray, received: np.ndarray, num_rows: int
) -> np.ndarray:
    """Returns [num_rows] bool: True where a later version or a removal of the event follows.

    Args:
        users: [n] number of the user of each row, and of each removal after all rows.
        keys: [n] uint64 keys of events; 0 for an event without an id.
        received: [n] int64 times at which a server received them; the last one counts.
        num_rows: How many of them are rows.
    """
    order = np.lexsort((received, keys, users))
    later = np.append(
        (users[order][1:] == users[order][:-1]) & (keys[order][1:] == keys[order][:-1]), False
    )
    kept = np.ones(len(keys), bool)
    kept[order] = ~later
    return np.asarray(~(kept[:num_rows] | (keys[:num_rows] == 0)))


def check_clocks(reports: Sequence[BadRows], parts: Sequence[tuple[str, int]]) -> None:
    """Raises SchemaError if the files have no valid rows, or order events differently.

    Args:
        reports: Report of each file.
        parts: Clock and number of valid rows of each file.
    """
    clocks = {
        clock: report.file for report, (clock, rows) in zip(reports, parts, strict=True) if rows
    }
    if not clocks:
        files = ", ".join(report.file for report in reports)
        raise SchemaError(f"{files}: no usable rows among {sum(r.num_rows for r in reports)}")
    if len(clocks) > 1:
        raise SchemaError(
            f"{clocks['position']} orders events by position and {clocks['timestamp']} by time; "
            "give all files a timestamp"
        )


def join_reports(
    reports: Sequence[BadRows],
    parts: Sequence[tuple[str, int]],
    num_events: int,
    num_versions: int,
    num_again: int,
) -> BadRows:
    """Returns the report of several files, without the numbers of the accepted rows.

    Args:
        reports: Report of each file.
        parts: Clock and number of valid rows of each file.
        num_events: Events that are left.
        num_versions: Rows that a later one of the same event replaced or removed.
        num_again: Events that several files have.

    Raises:
        SchemaError: If the files do not fit each other, or no event is left.
    """
    check_clocks(reports, parts)
    files = ", ".join(report.file for report in reports)
    if not num_events:
        raise SchemaError(f"{files}: all events were removed")
    dropped, notes = Counter[str](), Counter[str]()
    for report in reports:
        dropped.update(report.dropped)
        notes.update(report.notes)
    if num_versions:
        notes["rows corrected, removed or repeated by a later row of the same event"] = num_versions
    if num_again:
        notes["events that several files have, counted once"] = num_again
    return BadRows(
        files,
        sum(report.num_rows for report in reports),
        np.zeros(0, np.int64),
        dict(dropped),
        dict(notes),
        tuple(f"{report.file}: {example}" for report in reports for example in report.examples),
        tuple(column for report in reports for column in report.columns),
    )
