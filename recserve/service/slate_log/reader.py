"""Reads a slate log: one row per shown item, with the outcomes that it led to.

A log that does not fit into memory is divided into parts on disk, each with all rows of its slates.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.features.tables.buckets import Buckets
from recserve.features.tables.event_files import read_log_file
from recserve.service.slate_log.records import ADDED, FORMAT, SCHEMAS

KEYS = ["token_id", "item_id"]
# Slates of a part; with 50 items each, they and their items take about 1 GB while they are joined.
PART_SLATES = 100_000
MAX_PARTS = 256


def read_log(folder: Path | str, kind: str) -> pa.Table:
    """Returns all rows of one kind, oldest file first.

    Args:
        folder: Folder of the log.
        kind: `slates` or `outcomes`.

    Raises:
        SchemaError: If a file is damaged, or of another version of the log.
    """
    return pa.concat_tables([SCHEMAS[kind].empty_table(), *read_files(folder, kind)])


def read_files(folder: Path | str, kind: str) -> Iterator[pa.Table]:
    """Yields the rows of `read_log`, a file at a time."""
    for path in _paths(folder, kind):
        yield read_log_file(path, SCHEMAS[kind], FORMAT, ADDED)


def num_parts(folder: Path | str) -> int:
    """Returns how many parts of a log fit into memory one by one. Raises SchemaError."""
    about = 0
    for path in _paths(folder, "slates"):
        try:
            about += pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError):
            read_log_file(path, SCHEMAS["slates"], FORMAT, ADDED)  # says what is wrong
    return min(max(-(-about // PART_SLATES), 1), MAX_PARTS)


def read_parts(folder: Path | str, number: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yields the slates and the outcomes of parts of a log; all rows of a slate are in one part.

    Args:
        folder: Folder of the log.
        number: What `num_parts` returns.

    Raises:
        SchemaError: As of `read_log`.
    """
    if number == 1:
        yield read_log(folder, "slates"), read_log(folder, "outcomes")
        return
    with tempfile.TemporaryDirectory() as place:
        parts = []
        for kind, schema in SCHEMAS.items():
            parts.append(Buckets(Path(place), kind, number, schema))
            for table in read_files(folder, kind):
                tokens = table.column("token_id").combine_chunks().dictionary_encode()
                hashes = [zlib.crc32((t or "").encode()) for t in tokens.dictionary.to_pylist()]
                places = np.array([*hashes, 0], np.int64) % number
                codes = pc.fill_null(tokens.indices, len(hashes)).to_numpy(zero_copy_only=False)
                parts[-1].add(table, places[codes])
        for part in range(number):
            yield parts[0].take(part), parts[1].take(part)


def _paths(folder: Path | str, kind: str) -> list[Path]:
    return sorted(Path(folder).glob(f"{kind}-*.parquet"))


def shown_items(folder: Path | str, types: Collection[str] | None = None) -> pa.Table:
    """Returns one row per shown item, with its outcomes.

    Args:
        folder: Folder of the log.
        types: Event types that count as outcomes; None counts all.

    Returns:
        The columns of the slate, then `item_id`, `rank`, `score`, `source`, `team`, then
        `num_outcomes`, `first_outcome` (a time) and `value` (a sum). An outcome counts once per
        event, user and shown item; events without an id count once per type. A slate has one
        user: the first whose events name it, if it was made for an anonymous history.
    """
    return join_outcomes(read_log(folder, "slates"), read_log(folder, "outcomes"), types)


def join_outcomes(
    slates: pa.Table, outcomes: pa.Table, types: Collection[str] | None = None
) -> pa.Table:
    """Returns what `shown_items` does for a log with these rows."""
    lists = slates.column("items").combine_chunks()
    owners = pc.list_parent_indices(lists)
    shown = slates.drop_columns(["items"]).take(owners)
    items = pc.list_flatten(lists)
    for field in items.type:
        shown = shown.append_column(field.name, pc.struct_field(items, field.name))
    joined = shown.join(_outcome_rows(outcomes, types), keys=KEYS, join_type="left outer")
    place = joined.schema.get_field_index("num_outcomes")
    counts = pc.fill_null(joined.column("num_outcomes"), 0)
    joined = joined.set_column(place, "num_outcomes", counts)
    return joined.sort_by([("time", "ascending"), ("token_id", "ascending"), ("rank", "ascending")])


def _outcome_rows(rows: pa.Table, types: Collection[str] | None) -> pa.Table:
    """Returns one row per slate and item with an outcome."""
    if types is not None:
        rows = rows.filter(
            pc.is_in(rows.column("type"), value_set=pa.array(list(types), pa.string()))
        )
    rows = _of_one_user(rows)
    # Nothing tells events without an id apart, so a client could send one any number of times.
    events = pc.coalesce(rows.column("event"), rows.column("type"))
    rows = rows.select([*KEYS, "time", "value"]).append_column("event", events)
    once = rows.group_by([*KEYS, "event"]).aggregate([("time", "min"), ("value", "max")])
    once = once.rename_columns([*KEYS, "event", "time", "value"])
    counted = once.group_by(KEYS).aggregate([("time", "count"), ("time", "min"), ("value", "sum")])
    return counted.rename_columns([*KEYS, "num_outcomes", "first_outcome", "value"])


def _of_one_user(rows: pa.Table) -> pa.Table:
    """Returns the outcomes of the first user of each slate; a null user is one too."""
    users = pc.coalesce(rows.column("user"), "")
    rows = rows.set_column(rows.schema.get_field_index("user"), "user", users)
    by_time = rows.select(["token_id", "user", "time"]).sort_by("time")
    first = by_time.group_by("token_id", use_threads=False).aggregate([("user", "first")])
    joined = rows.join(first, keys="token_id")
    return joined.filter(pc.equal(joined.column("user"), joined.column("user_first")))
