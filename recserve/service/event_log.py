"""The log of accepted events and corrections as Parquet, which `recserve build` reads.

A row stands for a change that the history store has made: no duplicate, no refused event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recserve.features.history.history import (
    Applied,
    Change,
    CorruptHistory,
    Removal,
    Replacement,
    StoredEvent,
)
from recserve.features.history.type_names import EVENT_TYPES
from recserve.features.tables.event_files import KIND, SCHEMA
from recserve.schemas.events import EventInput
from recserve.service.parquet_log import LogOptions, ParquetLog


@dataclass(frozen=True)
class EventRecord:
    """A change of a user's stored events.

    Attributes:
        event: The event or correction of the client.
        change: What the store was told.
        time_us: Time of the stored event in microseconds since 1970; None if it was removed.
        received_us: Time of the request in microseconds since 1970.
    """

    event: EventInput
    change: StoredEvent | Replacement | Removal
    time_us: int | None
    received_us: int

    kind = KIND
    size = 1

    @property
    def user(self) -> str:
        """The user."""
        return self.event.user_id

    def row(self) -> dict[str, object]:
        """Returns the row of the record."""
        event, change = self.event, self.change
        removed = isinstance(change, Removal)
        stored = change.event if isinstance(change, Replacement) else change
        return {
            "received": self.received_us,
            "user_id": event.user_id,
            "item_id": None if removed else event.item_id,
            "timestamp": self.time_us,
            "type": None if removed else event.type or EVENT_TYPES[0],
            "value": stored.value if isinstance(stored, StoredEvent) else None,
            "event_id": event.event_id,
            "event_key": change.event_key,
            "correction": event.correction,
        }


class EventLogWriter(ParquetLog):
    """Logs the events and corrections that a store has taken."""

    def __init__(self, options: LogOptions) -> None:
        """Opens the folder. Raises OSError if it cannot be written."""
        super().__init__("event log", options, {KIND: SCHEMA}, "user_id")

    def take(
        self,
        events: Sequence[EventInput],
        users: Mapping[str, Sequence[tuple[int, Change]]],
        stored: Mapping[str, Applied | CorruptHistory],
        now_us: int,
    ) -> None:
        """Takes the events of a request; it returns at once.

        Args:
            events: The events of the request.
            users: Position in the request and change of each valid event, by user id.
            stored: What the store has made of them.
            now_us: Time of the request in microseconds since 1970.
        """
        records = [
            EventRecord(events[index], change, _time_us(change, applied), now_us)
            for user_id, applied in stored.items()
            if isinstance(applied, Applied)
            for (index, change), taken in zip(users[user_id], applied.taken, strict=True)
            if taken and isinstance(change, StoredEvent | Replacement | Removal)
        ]
        self.offer(*records)


def _time_us(change: Change, applied: Applied) -> int | None:
    """Returns the time of the stored event; None if there is none."""
    if isinstance(change, StoredEvent):
        return change.time_us
    if not isinstance(change, Replacement):
        return None
    if change.keeps_time and applied.revised is not None:
        after = applied.revised.after
        found = np.flatnonzero(after["event_key"] == np.uint64(change.event_key))
        if found.size:
            return int(after["time_us"][found[0]])
    return change.event.time_us
