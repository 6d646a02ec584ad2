"""The event log: events of all users, grouped by user, oldest first."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.features.history.event_kinds import POSITIVE, EventKinds
from recserve.features.history.event_weights import EventWeights
from recserve.features.tables.mapped_arrays import (
    blocks,
    counts_before,
    new_array,
    sum_by_row,
    take_where,
)

DAY_US = 86_400_000_000
SAMPLED_TIMES = 1 << 20  # that say which events are the newest
MIN_EVENTS = 3  # of a user whose last events are held out
GROUP_ROWS = 1 << 20  # of a group of rows of the events of a bundle


@dataclass(frozen=True)
class EventLog:
    """Packed events of U users: user u owns events `offsets[u] : offsets[u + 1]`, oldest first.

    Attributes:
        user_ids: [U] user ids.
        offsets: [U + 1] int64 first event of each user, then n.
        item_rows: [n] int32 rows of the item table.
        times: [n] int64 microseconds UTC, or positions if the source has no timestamps.
        types: [n] int16 index into `type_names`.
        type_names: Names of the event types.
        values: [n] float32 event values, 1 if the source has none.
        has_timestamps: True if `times` are timestamps.
        weights: [n] float32 how much each event counts; None: 1 each.
        held_out: [U] bool True for the users whose last events `leave_one_out` may hold out. None:
            all users.
    """

    user_ids: list[str]
    offsets: np.ndarray
    item_rows: np.ndarray
    times: np.ndarray
    types: np.ndarray
    type_names: tuple[str, ...]
    values: np.ndarray
    has_timestamps: bool
    weights: np.ndarray | None = None
    held_out: np.ndarray | None = None

    @property
    def num_users(self) -> int:
        """U, the number of users."""
        return len(self.user_ids)

    @property
    def num_events(self) -> int:
        """n, the number of events of all users."""
        return int(self.item_rows.shape[0])

    @property
    def is_mapped(self) -> bool:
        """Whether the times, which are the largest array, are mapped from disk."""
        return isinstance(self.times, np.memmap)

    def lengths(self) -> np.ndarray:
        """Returns [U] int64 events per user."""
        return np.diff(self.offsets)

    def user_indices(self) -> np.ndarray:
        """Returns [n] int64 user of each event."""
        return np.repeat(np.arange(self.num_users), self.lengths())

    def user_blocks(self) -> Iterator[slice]:
        """Yields slices that cover all users, each with about as many events as `blocks`."""
        starts = [part.start for part in blocks(self.num_events)]
        firsts = np.unique([0, *np.searchsorted(self.offsets, starts), self.num_users])
        for first, stop in pairwise(firsts.tolist()):
            yield slice(first, stop)

    def select(self, kept: np.ndarray) -> EventLog:
        """Returns the events where `kept` [n] bool is True. Users without events remain."""
        return EventLog(
            self.user_ids,
            counts_before(kept, self.offsets),
            take_where(self.item_rows, kept),
            take_where(self.times, kept),
            take_where(self.types, kept),
            self.type_names,
            take_where(self.values, kept),
            self.has_timestamps,
            None if self.weights is None else take_where(self.weights, kept),
            self.held_out,
        )

    def positive(self, kinds: EventKinds) -> EventLog:
        """Returns the positive events, without users and types that have none.

        Without other events this is the log itself.
        """
        kept = np.ones(self.num_events, bool)
        for part in blocks(self.num_events):
            found = kinds.of_events(self.type_names, self.types[part], self.values[part])
            kept[part] = found == POSITIVE
        if kept.all():
            return self
        left = self.select(kept)
        there = left.lengths() > 0
        counts = sum_by_row(left.types, len(self.type_names))
        used, number = np.flatnonzero(counts), (np.cumsum(counts > 0) - 1).astype(np.int16)
        for part in blocks(left.num_events):
            left.types[part] = number[left.types[part]]
        return replace(
            left,
            user_ids=[self.user_ids[user] for user in np.flatnonzero(there).tolist()],
            offsets=np.append(left.offsets[:-1][there], left.offsets[-1]),
            type_names=tuple(self.type_names[number] for number in used.tolist()),
            held_out=None if self.held_out is None else self.held_out[there],
        )

    def weighted(self, weights: EventWeights) -> EventLog:
        """Returns the events with their weights. Without entries this is the log itself."""
        if not weights:
            return self
        found = new_array(self.num_events, np.float32)
        for part in blocks(self.num_events):
            found[part] = weights.of_events(self.type_names, self.types[part], self.values[part])
        return replace(self, weights=found)

    def holding_out(self, users: int | None) -> EventLog:
        """Returns the log with at most so many users whose last events are held out; None: all.

        A hash of the id chooses them, so later events of a user change nothing.
        """
        enough = np.flatnonzero(self.lengths() >= MIN_EVENTS)
        if users is None or enough.size <= users:
            return self
        hashes = [zlib.crc32(self.user_ids[user].encode()) for user in enough.tolist()]
        held = np.zeros(self.num_users, bool)
        held[enough[np.argsort(np.array(hashes), kind="stable")[:users]]] = True
        return replace(self, held_out=held)

    def holdout(self) -> np.ndarray:
        """Returns [U] bool True for the users whose last two events are held out.

        A user with fewer than three events stays entirely in training, so that every evaluated user
        has a history.
        """
        enough: np.ndarray = self.lengths() >= MIN_EVENTS
        return enough if self.held_out is None else enough & self.held_out

    def leave_one_out(self) -> Split:
        """Splits off the last event of each user for test and the one before for validation.

        Users who are not in `holdout` stay entirely in training.
        """
        enough, last = self.holdout(), self.offsets[1:] - 1
        held = np.zeros(self.num_events, dtype=bool)
        held[last[enough]] = True
        held[last[enough] - 1] = True
        test = np.full(self.num_users, -1, dtype=np.int32)
        valid = np.full(self.num_users, -1, dtype=np.int32)
        test[enough] = self.item_rows[last[enough]]
        valid[enough] = self.item_rows[last[enough] - 1]
        return Split(self.select(~held), valid, test)

    def counts(self, num_items: int) -> np.ndarray:
        """Returns [I] float32 events per item."""
        return sum_by_row(self.item_rows, num_items).astype(np.float32)

    def popularity(self, num_items: int) -> np.ndarray:
        """Returns [I] float32 sums of the weights of each item's events."""
        if self.weights is None:
            return self.counts(num_items)
        return sum_by_row(self.item_rows, num_items, self.weights).astype(np.float32)

    def pairs(self, distance: int) -> Iterator[np.ndarray]:
        """Yields, in blocks, the [p] int64 events that another one of the user follows.

        Args:
            distance: How many events later that one is.
        """
        ends = self.offsets[1:]
        for part in blocks(max(self.num_events - distance, 0)):
            # The users of the block, and for each the end of the events that have a later one.
            first, last = np.searchsorted(ends, (part.start, part.stop), side="right").tolist()
            owned = np.diff(np.concatenate([[part.start], ends[first:last], [part.stop]]))
            limits = np.repeat(ends[first : last + 1] - distance, owned)
            events = np.arange(part.start, part.stop)
            yield events[events < limits]

    def item_ranges(self, num_items: int, num_events: int) -> list[tuple[int, int]]:
        """Returns ranges of items that cover all: each has about `num_events`, or is one item."""
        events = np.cumsum(self.counts(num_items), dtype=np.float64)
        steps = np.arange(num_events, self.num_events, num_events)
        cuts = np.unique([0, *np.searchsorted(events, steps), num_items]).tolist()
        return list(zip(cuts[:-1], cuts[1:], strict=True))

    def relative_weights(self, half_life_days: float | None = None) -> np.ndarray | None:
        """Returns [n] float32 weights with a mean of 1; None if each event counts 1.

        Args:
            half_life_days: An event counts half as much as one that is so many days newer. Clocks
                of clients may be wrong: the newest thousandth of all events is of one age. None:
                the age does not count.

        Raises:
            ValueError: If all weights are 0, or the age counts and the events have no times.
        """
        weights = self.weights
        if half_life_days is not None and self.num_events:
            if not self.has_timestamps:
                raise ValueError("half_life_days is set; the events have no timestamps")
            some = self.times[:: 1 + self.num_events // SAMPLED_TIMES]
            newest = np.quantile(some, 0.999, method="higher")
            weights = new_array(self.num_events, np.float32)
            for part in blocks(self.num_events):
                ages = np.maximum(newest - self.times[part], 0) / (half_life_days * DAY_US)
                weights[part] = np.exp2(-ages)
                if self.weights is not None:
                    weights[part] *= self.weights[part]
        if weights is None:
            return None
        total = float(weights.sum(dtype=np.float64))
        if not total:
            raise ValueError("all events have the weight 0, so there is nothing to train on")
        return (weights * (self.num_events / total)).astype(np.float32)

    def to_arrow(self, item_ids: list[str]) -> pa.Table:
        """Returns a table that `event_table.read_events` can read.

        Args:
            item_ids: [I] id of each item row.
        """
        return next(self._tables(item_ids, max(self.num_events, 1)))

    def write(self, path: Path, item_ids: list[str]) -> None:
        """Writes the table of `to_arrow` as Parquet, with one group of its rows in memory.

        Args:
            path: The new file.
            item_ids: [I] id of each item row.
        """
        tables = self._tables(item_ids, GROUP_ROWS)
        first = next(tables)
        with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
            for table in chain([first], tables):
                writer.write_table(table, GROUP_ROWS)

    def _tables(self, item_ids: list[str], rows: int) -> Iterator[pa.Table]:
        """Yields the events as tables of `rows` rows; an empty one for no events."""
        user_ids, all_items = pa.array(self.user_ids, pa.string()), pa.array(item_ids, pa.string())
        names = pa.array(self.type_names, pa.string())
        for first in range(0, max(self.num_events, 1), rows):
            part = slice(first, min(first + rows, self.num_events))
            places = np.arange(part.start, part.stop)
            users = np.searchsorted(self.offsets, places, side="right") - 1
            users = pa.DictionaryArray.from_arrays(users, user_ids)
            items = pa.DictionaryArray.from_arrays(self.item_rows[part], all_items)
            clock = (
                ("timestamp", pa.array(self.times[part], pa.timestamp("us", tz="UTC")))
                if self.has_timestamps
                else ("position", pa.array(self.times[part]))
            )
            types = pa.DictionaryArray.from_arrays(self.types[part], names)
            columns = {"user_id": users.cast(pa.string()), "item_id": items.cast(pa.string())}
            columns |= {clock[0]: clock[1], "type": types.cast(pa.string())}
            yield pa.table(columns | {"value": pa.array(self.values[part])})


@dataclass(frozen=True)
class Split:
    """Leave-one-out split of an event log.

    Attributes:
        train: All events that are not held out.
        valid_rows: [U] int32 held-out item row for validation, -1 for a user without one.
        test_rows: [U] int32 held-out item row for test, -1 for a user without one.
    """

    train: EventLog
    valid_rows: np.ndarray
    test_rows: np.ndarray
