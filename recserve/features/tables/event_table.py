"""Reads the event table, checks every row and groups the events by user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from recserve.features.tables import large_events
from recserve.features.tables.column_names import names_of_table
from recserve.features.tables.event_files import is_event_log, read_event_chunks
from recserve.features.tables.event_rows import (
    COLUMNS,
    EventPart,
    EventRows,
    check_clocks,
    checked_rows,
    find_superseded,
    join_reports,
    repeats,
)
from recserve.features.tables.events import EventLog
from recserve.features.tables.input_table import InputTable
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import BadRows, OnBadRows, SchemaError


def read_events(
    path: str | Path | Sequence[Path],
    items: ItemTable,
    on_bad_rows: OnBadRows = "error",
    columns: Mapping[str, str] | None = None,
    valued: Collection[str] = (),
) -> tuple[EventLog, BadRows]:
    """Reads events from Parquet, CSV or JSON lines, from event logs of servers, or from several.

    Users are numbered by first appearance. The columns are:

    - `user_id` and `item_id`: strings or integers.
    - `timestamp`: what `conversions.convert_times` reads; a time without a time zone is UTC.
    - `position`: any integer. It orders events if there is no timestamp, or events of the same
      time.
    - `type`: optional string.
    - `value`: optional number.
    - `event_id`: optional id of the event. It joins an event with its copy and its corrections in
      another file.

    These rows are rejected:

    - A null or empty id, a long user id, an unknown item, a null time, a time or position out of
      the bounds of a history, a blank or long type, or a value that is not a finite 32-bit float.
    - An event that repeats user, item, time and type of an earlier row.
    - A repeated position of a user, if there is no timestamp.

    Each user's events are sorted by time, then by position; ties stay in file order. The report
    counts the rows that are older than the previous row of their user.

    A folder whose files are no event log has the parts of one file, in the order of their paths:
    all of Parquet, CSV or JSON lines, with the same columns. Parts may be in sub-folders. What only
    the name of a sub-folder says, as in `day=2026-11-01`, is no column; the report has a line.

    Each file is checked by itself. Of an event that several hold, the version that a server
    received last counts, and an event that was removed is left out.

    Args:
        path: File with `timestamp` or `position` or both; the folder of its parts, or of an event
            log; or several.
        items: Items that events may refer to.
        on_bad_rows: "error" raises if a row is rejected, "skip" drops rejected rows.
        columns: Names of columns in the file by our name, as of `--column`.
        valued: Types whose events need a value; one without is rejected.

    Returns:
        The events, and a report of columns and of rejected and changed rows.

    Raises:
        SchemaError: If the file is unreadable or columns are missing or mistyped.
        BadRowError: If a row is rejected under "error".
    """
    names = names_of_table(columns or {}, "events", COLUMNS)
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    if not paths:
        raise SchemaError("no file of events is given; expected one or more")
    if large_events.num_rows_about(paths) > large_events.ROWS_IN_MEMORY:
        return large_events.read_large_events(paths, names, items, on_bad_rows, valued)
    if len(paths) > 1 or is_event_log(paths[0]):
        parts = [EventPart.of(one, names, items, on_bad_rows, valued) for one in paths]
        return _join(parts)
    source = InputTable(paths[0], COLUMNS, names)
    arrays, check = checked_rows(source, items, on_bad_rows, valued)
    kept = check.finish()
    check.note(f"rows out of {arrays.clock} order, sorted", arrays.num_unordered(kept))
    return arrays.log(kept), check.report(source.columns())


def find_problems(
    path: str | Path | Sequence[Path], columns: Mapping[str, str] | None = None
) -> list[str]:
    """Returns why the columns of event files cannot be used, whatever the items are."""
    names = names_of_table(columns or {}, "events", COLUMNS)
    problems = []
    for one in [path] if isinstance(path, str | Path) else path:
        try:
            if not is_event_log(Path(one)):
                large_events.check_columns_of(Path(one), names)
            else:
                for _ in read_event_chunks(Path(one)):
                    pass
        except SchemaError as error:
            problems.append(str(error))
    return problems


def _join(parts: Sequence[EventPart]) -> tuple[EventLog, BadRows]:
    """Returns the events of several files, each event once, and a report of all files."""
    reports = [part.report for part in parts]
    clocks = [(part.arrays.clock, len(part.keys)) for part in parts]
    check_clocks(reports, clocks)
    there = [part for part in parts if len(part.keys)]
    arrays = EventRows.concat([part.arrays for part in there])
    num_rows = len(arrays.users)
    # The removals follow the rows; what is last of an event counts.
    users = pa.concat_arrays([arrays.users, *(part.removed for part in parts)])
    codes = users.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    old = find_superseded(
        codes,
        np.concatenate([*(part.keys for part in there), *(part.removed_keys for part in parts)]),
        np.concatenate([*(part.received for part in there), *(part.removed_at for part in parts)]),
        num_rows,
    )
    identity = (codes[:num_rows], arrays.item_rows, arrays.order_by.values, arrays.types)
    again = repeats(identity, ~old)
    rows = np.flatnonzero(~old & ~again)
    report = join_reports(reports, clocks, rows.size, int(old.sum()), int(again.sum()))
    kept_rows = np.concatenate([part.report.kept_rows for part in there])[rows]
    return arrays.log(rows), replace(report, kept_rows=kept_rows)
