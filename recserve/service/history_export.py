"""Writes the events of a history store as an event log, which `recserve build` reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from recserve.bounds import MAX_ID_LENGTH, MIN_TIME_US
from recserve.features.catalog.versions import CatalogVersion
from recserve.features.history.history import HistoryStore
from recserve.features.tables.event_files import KIND, SCHEMA, TIME
from recserve.service.event_types import EventTypes
from recserve.service.parquet_log import LogFiles

USERS_PER_READ = 1000
ROWS_PER_FILE = 1_000_000


@dataclass(frozen=True)
class ExportReport:
    """What an export has written.

    Attributes:
        num_users: Users with exported events.
        num_events: Exported events.
        num_unknown: Events that were left out, because the catalogue does not know their item.
        num_positions: Events that were left out, because they have a position and no time.
        num_damaged: Users whose stored history is damaged, and who were left out.
    """

    num_users: int
    num_events: int
    num_unknown: int
    num_positions: int
    num_damaged: int


def export_events(
    store: HistoryStore,
    types: EventTypes,
    items: CatalogVersion,
    out: Path,
    since_us: int | None = None,
) -> ExportReport:
    """Writes the stored events of all users to a folder.

    Args:
        store: The store.
        types: Names of its event types.
        items: The items whose events are exported.
        out: The folder. It is created, and may hold an event log.
        since_us: Time in microseconds since 1970 of the oldest events; None exports all.

    Raises:
        ListingUnsupported: If the store cannot list its users.
        StoreUnavailable: If the store does not answer.
    """
    files = LogFiles(out, 1 << 62, {KIND: SCHEMA}, "user_id")
    received = time.time_ns() // 1000
    seen: set[str] = set()
    tables: list[pa.Table] = []
    num_users = num_rows = num_unknown = num_positions = num_damaged = 0
    after: str | None = None
    while True:
        page = store.users("", USERS_PER_READ, after)
        users = [u for u in dict.fromkeys(page.ids) if len(u) <= MAX_ID_LENGTH and u not in seen]
        seen.update(users)
        for user_id, stored in zip(users, store.get_many(users), strict=True):
            if isinstance(stored, ConnectionError):
                raise stored
            if isinstance(stored, Exception):
                num_damaged += 1
                continue
            dated = stored[stored["time_us"] >= MIN_TIME_US]
            num_positions += len(stored) - len(dated)
            if since_us is not None:
                dated = dated[dated["time_us"] >= since_us]
            known = items.rows_of_keys(dated["item_key"]) >= 0
            num_unknown += int(np.count_nonzero(~known))
            if not known.any():
                continue
            tables.append(_rows(types, user_id, dated[known], items, received))
            num_users += 1
            num_rows += tables[-1].num_rows
            if sum(table.num_rows for table in tables) >= ROWS_PER_FILE:
                files.write_table(KIND, pa.concat_tables(tables))
                tables = []
        after = page.next
        if after is None:
            break
    if tables:
        files.write_table(KIND, pa.concat_tables(tables))
    return ExportReport(num_users, num_rows, num_unknown, num_positions, num_damaged)


def _rows(
    types: EventTypes, user_id: str, stored: np.ndarray, items: CatalogVersion, received: int
) -> pa.Table:
    """Returns stored events as rows of an event log."""
    count, rows = len(stored), items.rows_of_keys(stored["item_key"]).tolist()
    columns = {
        "received": pa.array([received] * count, TIME),
        "user_id": pa.array([user_id] * count),
        "item_id": pa.array([items.item_id(row) for row in rows]),
        "timestamp": pa.array(stored["time_us"]).cast(TIME),
        "type": pa.array(types.names(stored["type"])),
        "value": pa.array(stored["value"].astype(np.float64)),
        "event_id": pa.nulls(count, pa.string()),
        "event_key": pa.array(stored["event_key"]),
        "correction": pa.nulls(count, pa.string()),
    }
    return pa.table(columns, schema=SCHEMA)
