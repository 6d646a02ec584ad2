"""Reads a slate log: one row per shown item, with the outcomes that it led to."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recserve.features.tables.event_files import read_log_file
from recserve.service.slate_log.records import FORMAT, SCHEMAS

KEYS = ["token_id", "item_id"]


def read_log(folder: Path | str, kind: str) -> pa.Table:
    """Returns all rows of one kind, oldest file first.

    Args:
        folder: Folder of the log.
        kind: `slates` or `outcomes`.

    Raises:
        SchemaError: If a file is damaged, or of another version of the log.
    """
    paths = sorted(Path(folder).glob(f"{kind}-*.parquet"))
    tables = [read_log_file(path, SCHEMAS[kind], FORMAT) for path in paths]
    return pa.concat_tables(tables) if tables else SCHEMAS[kind].empty_table()


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
    slates = read_log(folder, "slates")
    lists = slates.column("items").combine_chunks()
    owners = pc.list_parent_indices(lists)
    shown = slates.drop_columns(["items"]).take(owners)
    items = pc.list_flatten(lists)
    for field in items.type:
        shown = shown.append_column(field.name, pc.struct_field(items, field.name))
    joined = shown.join(_outcomes(folder, types), keys=KEYS, join_type="left outer")
    place = joined.schema.get_field_index("num_outcomes")
    counts = pc.fill_null(joined.column("num_outcomes"), 0)
    joined = joined.set_column(place, "num_outcomes", counts)
    return joined.sort_by([("time", "ascending"), ("token_id", "ascending"), ("rank", "ascending")])


def _outcomes(folder: Path | str, types: Collection[str] | None) -> pa.Table:
    """Returns one row per slate and item with an outcome."""
    rows = read_log(folder, "outcomes")
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
