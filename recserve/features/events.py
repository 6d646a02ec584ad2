"""The event log: who did what and when, grouped by user, oldest first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.features.items import ItemTable
from recserve.features.parquet import (
    BadRows,
    OnBadRows,
    RowCheck,
    SchemaError,
    column,
    is_text,
    null_or_blank,
    read_table,
    text_column,
)

DEFAULT_TYPE = "event"
COLUMNS = ("user_id", "item_id", "timestamp", "position", "type", "value")


@dataclass(frozen=True)
class EventLog:
    """Events of U users, packed: user u owns `offsets[u] : offsets[u + 1]`, oldest first.

    user_ids [U]. offsets [U+1] int64. item_rows [n] int32: rows of the item table. times [n]
    int64: microseconds UTC, or the position in the user's history where the source has no
    timestamps. types [n] int16: index into type_names. values [n] float32: the event's value, 1
    where the source has none.
    """

    user_ids: list[str]
    offsets: np.ndarray
    item_rows: np.ndarray
    times: np.ndarray
    types: np.ndarray
    type_names: tuple[str, ...]
    values: np.ndarray
    has_timestamps: bool

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.user_ids)

    @property
    def num_events(self) -> int:
        """Events of all users."""
        return int(self.item_rows.shape[0])

    def lengths(self) -> np.ndarray:
        """[U] events of each user."""
        return np.diff(self.offsets)

    def user_indices(self) -> np.ndarray:
        """[n] the user of each event."""
        return np.repeat(np.arange(self.num_users), self.lengths())

    def rows_of(self, user: int) -> np.ndarray:
        """Item rows of one user, oldest first."""
        return self.item_rows[self.offsets[user] : self.offsets[user + 1]]

    def select(self, kept: np.ndarray) -> EventLog:
        """The events where `kept` [n] bool is set; every user stays, even without events."""
        counts = np.concatenate([[0], np.cumsum(kept)])
        return EventLog(
            self.user_ids,
            counts[self.offsets].astype(np.int64),
            self.item_rows[kept],
            self.times[kept],
            self.types[kept],
            self.type_names,
            self.values[kept],
            self.has_timestamps,
        )

    def leave_one_out(self) -> Split:
        """A user's last event is test, the one before it validation, the rest is training.

        A user with fewer than three events keeps all of them in training (rows -1), so that
        nobody is evaluated without a history.
        """
        lengths, last = self.lengths(), self.offsets[1:] - 1
        enough = lengths >= 3
        held = np.zeros(self.num_events, dtype=bool)
        held[last[enough]] = True
        held[last[enough] - 1] = True
        test = np.full(self.num_users, -1, dtype=np.int32)
        valid = np.full(self.num_users, -1, dtype=np.int32)
        test[enough] = self.item_rows[last[enough]]
        valid[enough] = self.item_rows[last[enough] - 1]
        return Split(self.select(~held), valid, test)

    def popularity(self, num_items: int) -> np.ndarray:
        """[I] float32, events per item."""
        return np.bincount(self.item_rows, minlength=num_items).astype(np.float32)

    def to_arrow(self, item_ids: list[str]) -> pa.Table:
        """The log as a table that `read_events` reads back."""
        users = pa.DictionaryArray.from_arrays(self.user_indices(), pa.array(self.user_ids))
        items = pa.DictionaryArray.from_arrays(self.item_rows, pa.array(item_ids))
        clock = (
            ("timestamp", pa.array(self.times, pa.timestamp("us", tz="UTC")))
            if self.has_timestamps
            else ("position", pa.array(self.times))
        )
        types = pa.DictionaryArray.from_arrays(self.types, pa.array(self.type_names))
        columns = {"user_id": users.cast(pa.string()), "item_id": items.cast(pa.string())}
        columns |= {clock[0]: clock[1], "type": types.cast(pa.string())}
        return pa.table(columns | {"value": pa.array(self.values)})


@dataclass(frozen=True)
class Split:
    """Leave-one-out.

    train: all but the held events. valid_rows, test_rows [U] int32: item rows, -1 where none is
    held.
    """

    train: EventLog
    valid_rows: np.ndarray
    test_rows: np.ndarray


def read_events(
    path: str | Path, items: ItemTable, on_bad_rows: OnBadRows = "error"
) -> tuple[EventLog, BadRows]:
    """Events from Parquet: `user_id`, `item_id`, `timestamp` or `position`, `type`?, `value`?.

    timestamp: any Arrow timestamp (without a zone: UTC). position: any integer, used where there
    is no timestamp, else it orders events of one time. Refused rows: a null or empty id, an
    unknown item, a null time, a value that is not finite, an event that appeared before (same
    user, item, time and type), a position of a user that appeared before. A row older than an
    earlier row of its user raises under "error"; under "skip" the user's events are sorted by
    time, ties in file order, and the moved rows are counted. Users are numbered by first
    appearance. Raises SchemaError for the file or a column, BadRowError for a row.
    """
    path = Path(path)
    table = read_table(path)
    users = text_column(table, path, "user_id")
    item_ids = text_column(table, path, "item_id")
    types, type_names = _types(table, path)
    values = _values(table, path)
    times, positions, has_timestamps = _times(table, path)
    order_by = positions if not has_timestamps else times
    clock = "timestamp" if has_timestamps else "position"

    check = RowCheck(path, table.num_rows, on_bad_rows)
    check.refuse(
        null_or_blank(users), "null user_id", "user_id", lambda r: "the id is null or empty"
    )
    check.refuse(
        null_or_blank(item_ids), "null item_id", "item_id", lambda r: "the id is null or empty"
    )
    known = pc.index_in(item_ids, value_set=pa.array(items.ids, pa.large_string()))
    item_rows = pc.fill_null(known, -1).to_numpy(zero_copy_only=False).astype(np.int32)
    check.refuse(
        item_rows < 0,
        "unknown item_id",
        "item_id",
        lambda r: f"{item_ids[r].as_py()!r} is not among the items",
    )
    check.refuse(_nulls(table, clock), f"null {clock}", clock, lambda r: f"the {clock} is null")
    check.refuse(~np.isfinite(values), "value not finite", "value", lambda r: f"it is {values[r]}")

    user_codes = _encode_kept(users, check.kept)
    keys = (user_codes, item_rows, order_by, types)
    check.refuse(
        _repeats(keys, check.kept),
        "duplicate event",
        "item_id",
        lambda r: (
            f"user {users[r].as_py()!r} has item {item_ids[r].as_py()!r} at this {clock} before"
        ),
    )
    if not has_timestamps:
        check.refuse(
            _repeats((user_codes, order_by), check.kept),
            "duplicate position",
            clock,
            lambda r: f"user {users[r].as_py()!r} has position {order_by[r]} before",
        )
    _check_order(check, user_codes, times, positions, clock, users)

    kept = np.flatnonzero(check.kept)
    if not kept.size:
        raise SchemaError(f"{path}: no usable rows are left of {table.num_rows}")
    # Dropping may have emptied users: number the ones that are left by first appearance.
    left = users.take(pa.array(kept)).dictionary_encode()
    codes = left.indices.to_numpy(zero_copy_only=False)
    order = kept[np.lexsort((positions[kept], times[kept], codes))]
    counts = np.bincount(codes, minlength=len(left.dictionary))
    log = EventLog(
        left.dictionary.to_pylist(),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        item_rows[order],
        order_by[order],
        types[order],
        type_names,
        values[order],
        has_timestamps,
    )
    return log, check.report(tuple(n for n in table.column_names if n not in COLUMNS))


def _times(table: pa.Table, path: Path) -> tuple[np.ndarray, np.ndarray, bool]:
    """Times and positions [n] int64 (zeros without the column), and whether there are times."""
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
    return times, positions, "timestamp" in names


def _types(table: pa.Table, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """[n] int16 type of each event and the sorted names; a null type is "event"."""
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
    """[n] float32 value of each event, 1 where there is none."""
    if "value" not in table.column_names:
        return np.ones(table.num_rows, dtype=np.float32)

    def accepts(kind: Any) -> bool:
        return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))

    values = column(table, path, "value", accepts, "float")
    filled = pc.fill_null(pc.cast(values, pa.float32(), safe=False), 1.0)
    return np.asarray(filled.to_numpy(), dtype=np.float32)


def _nulls(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table.column(name).is_null().to_numpy(), dtype=bool)


def _encode_kept(users: pa.Array, kept: np.ndarray) -> np.ndarray:
    """[n] int64 number of each row's user, -1 where the row is refused."""
    codes = users.dictionary_encode().indices
    filled = pc.fill_null(codes, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.where(kept, filled, -1)


def _repeats(keys: tuple[np.ndarray, ...], kept: np.ndarray) -> np.ndarray:
    """[n] bool, set where a kept row equals an earlier kept row in all keys."""
    rows = np.flatnonzero(kept)
    columns = [key[rows] for key in keys]
    order = np.lexsort(columns[::-1])
    same = np.ones(max(rows.size - 1, 0), dtype=bool)
    for values in columns:
        ranked = values[order]
        same &= ranked[1:] == ranked[:-1]
    repeated = np.zeros(kept.size, dtype=bool)
    repeated[rows[order[1:][same]]] = True
    return repeated


def _check_order(
    check: RowCheck,
    user_codes: np.ndarray,
    times: np.ndarray,
    positions: np.ndarray,
    clock: str,
    users: pa.Array,
) -> None:
    """Raise on, or count, rows that come before (in time) an earlier row of their user."""
    rows = np.flatnonzero(check.kept)
    rows = rows[np.argsort(user_codes[rows], kind="stable")]
    user, time, position = user_codes[rows], times[rows], positions[rows]
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
        lambda r: f"older than the row before it of user {users[r].as_py()!r}",
    )
