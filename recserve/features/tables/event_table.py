"""Reads the event table from Parquet, checks every row and groups the events by user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.features.history.history import MAX_USER_ID_BYTES
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import (
    BadRows,
    OnBadRows,
    RowCheck,
    SchemaError,
    column,
    id_column,
    is_text,
    null_or_blank,
    read_table,
)

DEFAULT_TYPE = "event"
COLUMNS = ("user_id", "item_id", "timestamp", "position", "type", "value")


def read_events(
    path: str | Path, items: ItemTable, on_bad_rows: OnBadRows = "error"
) -> tuple[EventLog, BadRows]:
    """Reads events from Parquet.

    Users are numbered by first appearance. The columns are:

    - `user_id` and `item_id`: strings or integers.
    - `timestamp`: any Arrow timestamp; one without a time zone is UTC.
    - `position`: any integer. It orders events if there is no timestamp, or events of the same
      time.
    - `type`: optional string.
    - `value`: optional number.

    These rows are rejected:

    - A null or empty id, a long user id, an unknown item, a null time, or a value that is not
      finite.
    - An event that repeats user, item, time and type of an earlier row.
    - A repeated position of a user, if there is no timestamp.
    - A row that is older than the previous row of its user. Under "skip" such rows are sorted by
      time and counted instead; ties stay in file order.

    Args:
        path: Parquet file with `timestamp` or `position` or both.
        items: Items that events may refer to.
        on_bad_rows: "error" raises at the first rejected row, "skip" drops rejected rows.

    Returns:
        The events, and a report of rejected and changed rows.

    Raises:
        SchemaError: If the file is unreadable or a column is missing or mistyped.
        BadRowError: If a row is rejected under "error".
    """
    path = Path(path)
    table = read_table(path)
    columns = _Columns.of(table, path, items)
    check = RowCheck(path, table.num_rows, on_bad_rows)
    columns.reject_invalid(check)
    kept = np.flatnonzero(check.kept)
    if not kept.size:
        raise SchemaError(f"{path}: no usable rows among {table.num_rows}")
    return columns.log(kept), check.report(tuple(n for n in table.column_names if n not in COLUMNS))


@dataclass(frozen=True)
class _Columns:
    """The n rows of an event file, as arrays.

    Attributes:
        users: [n] user ids.
        item_ids: [n] item ids.
        item_rows: [n] int32 item rows, -1 for an unknown item.
        types: [n] int16 index into `type_names`.
        type_names: Sorted names of the event types.
        values: [n] float32 values.
        times: [n] int64 microseconds, zeros without the column.
        positions: [n] int64 positions, zeros without the column.
        clock: Name of the column that orders a user's events.
        no_clock: [n] bool, True where the clock is null.
    """

    users: pa.Array
    item_ids: pa.Array
    item_rows: np.ndarray
    types: np.ndarray
    type_names: tuple[str, ...]
    values: np.ndarray
    times: np.ndarray
    positions: np.ndarray
    clock: str
    no_clock: np.ndarray

    @classmethod
    def of(cls, table: pa.Table, path: Path, items: ItemTable) -> _Columns:
        """Converts the columns. Raises SchemaError for a missing or mistyped column."""
        users = id_column(table, path, "user_id")
        item_ids = id_column(table, path, "item_id")
        known = pc.index_in(item_ids, value_set=pa.array(items.ids, pa.large_string()))
        times, positions, clock = _times(table, path)
        return cls(
            users,
            item_ids,
            pc.fill_null(known, -1).to_numpy(zero_copy_only=False).astype(np.int32),
            *_types(table, path),
            _values(table, path),
            times,
            positions,
            clock,
            np.asarray(table.column(clock).is_null().to_numpy(), dtype=bool),
        )

    @property
    def order_by(self) -> np.ndarray:
        """[n] int64 values of the clock."""
        return self.times if self.clock == "timestamp" else self.positions

    def reject_invalid(self, check: RowCheck) -> None:
        """Rejects invalid rows, first each row by itself, then rows that repeat earlier ones."""
        clock = self.clock
        for ids, name in ((self.users, "user_id"), (self.item_ids, "item_id")):
            blank = null_or_blank(ids)
            check.refuse(blank, f"null {name}", name, lambda r: "the id is null or empty")
        long = pc.fill_null(pc.greater(pc.binary_length(self.users), MAX_USER_ID_BYTES), False)
        check.refuse(
            np.asarray(long.to_numpy(zero_copy_only=False), dtype=bool),
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
        check.refuse(self.no_clock, f"null {clock}", clock, lambda r: f"the {clock} is null")
        check.refuse(
            ~np.isfinite(self.values),
            "value not finite",
            "value",
            lambda r: f"it is {self.values[r]}",
        )
        user_codes = _encode_kept(self.users, check.kept)
        self._reject_repeats(check, user_codes)
        self._reject_unordered(check, user_codes)

    def log(self, kept: np.ndarray) -> EventLog:
        """Returns the events of the given rows, with users numbered by first appearance."""
        left = self.users.take(pa.array(kept)).dictionary_encode()
        codes = left.indices.to_numpy(zero_copy_only=False)
        order = kept[np.lexsort((self.positions[kept], self.times[kept], codes))]
        counts = np.bincount(codes, minlength=len(left.dictionary))
        return EventLog(
            left.dictionary.to_pylist(),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            self.item_rows[order],
            self.order_by[order],
            self.types[order],
            self.type_names,
            self.values[order],
            self.clock == "timestamp",
        )

    def _reject_repeats(self, check: RowCheck, user_codes: np.ndarray) -> None:
        clock, users = self.clock, self.users
        check.refuse(
            _repeats((user_codes, self.item_rows, self.order_by, self.types), check.kept),
            "duplicate event",
            "item_id",
            lambda r: (
                f"user {users[r].as_py()!r} already has item {self.item_ids[r].as_py()!r} "
                f"at this {clock}"
            ),
        )
        if clock == "position":
            check.refuse(
                _repeats((user_codes, self.positions), check.kept),
                "duplicate position",
                clock,
                lambda r: f"user {users[r].as_py()!r} already has position {self.positions[r]}",
            )

    def _reject_unordered(self, check: RowCheck, user_codes: np.ndarray) -> None:
        """Rejects, or under "skip" counts, rows that are older than their user's previous row."""
        clock, users = self.clock, self.users
        rows = np.flatnonzero(check.kept)
        rows = rows[np.argsort(user_codes[rows], kind="stable")]
        user, time, position = user_codes[rows], self.times[rows], self.positions[rows]
        back = (time[1:] < time[:-1]) | ((time[1:] == time[:-1]) & (position[1:] < position[:-1]))
        late = rows[1:][back & (user[1:] == user[:-1])]
        if check.on_bad_rows == "skip":
            check.note(f"rows out of {clock} order, sorted", int(late.size))
            return
        unordered = np.zeros(check.kept.size, dtype=bool)
        unordered[late] = True
        check.refuse(
            unordered,
            f"unordered {clock}",
            clock,
            lambda r: f"older than the previous row of user {users[r].as_py()!r}",
        )


def _times(table: pa.Table, path: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns times [n] int64, positions [n] int64 and the name of the ordering column.

    A missing column gives zeros.
    """
    names = table.column_names
    if "timestamp" not in names and "position" not in names:
        raise SchemaError(
            f"{path}: column timestamp (timestamp) or position (integer) is missing; "
            f"the file has {', '.join(names)}"
        )
    times = positions = np.zeros(table.num_rows, dtype=np.int64)
    if "timestamp" in names:
        values = column(table, path, "timestamp", pa.types.is_timestamp, "timestamp")
        micros = pc.cast(values, pa.timestamp("us", tz=values.type.tz), safe=False)
        times = pc.fill_null(pc.cast(micros, pa.int64()), 0).to_numpy()
    if "position" in names:
        values = column(table, path, "position", pa.types.is_integer, "integer")
        positions = pc.fill_null(pc.cast(values, pa.int64(), safe=False), 0).to_numpy()
    return times, positions, "timestamp" if "timestamp" in names else "position"


def _types(table: pa.Table, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns [n] int16 event types and their sorted names; a null type is "event"."""
    if "type" not in table.column_names:
        return np.zeros(table.num_rows, dtype=np.int16), (DEFAULT_TYPE,)
    values = column(table, path, "type", is_text, "string")
    texts = pc.fill_null(pc.cast(values, pa.large_string()), DEFAULT_TYPE).combine_chunks()
    names = sorted(texts.unique().to_pylist())
    if len(names) > np.iinfo(np.int16).max:
        raise SchemaError(f"{path}: column type has {len(names)} distinct values; at most 32767")
    codes = pc.index_in(texts, value_set=pa.array(names, pa.large_string()))
    return codes.to_numpy(zero_copy_only=False).astype(np.int16), tuple(names)


def _values(table: pa.Table, path: Path) -> np.ndarray:
    """Returns [n] float32 values of the events; a missing value is 1."""
    if "value" not in table.column_names:
        return np.ones(table.num_rows, dtype=np.float32)

    def accepts(kind: Any) -> bool:
        return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))

    values = column(table, path, "value", accepts, "float")
    filled = pc.fill_null(pc.cast(values, pa.float32(), safe=False), 1.0)
    return np.asarray(filled.to_numpy(), dtype=np.float32)


def _encode_kept(users: pa.Array, kept: np.ndarray) -> np.ndarray:
    """Returns [n] int64 user numbers, -1 for rejected rows."""
    codes = users.dictionary_encode().indices
    filled = pc.fill_null(codes, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.where(kept, filled, -1)


def _repeats(keys: tuple[np.ndarray, ...], kept: np.ndarray) -> np.ndarray:
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
