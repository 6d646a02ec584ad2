"""The Parquet files of an event log: events that servers have accepted, and their corrections.

A row is an event as it was stored, or a correction of an earlier one. `event_key` names the event
of a user in the history store; `event_id` is the id that the client gave, if he gave one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.features.history.history import event_key
from recserve.features.tables.parquet import SchemaError
from recserve.files import FORMAT_KEY, UnreadableFile, check_metadata

FORMAT = "recserve-event-log/1"
KIND = "events"
PATTERN = f"{KIND}-*.parquet"
LOG_NAME = re.compile(rf"{KIND}-\d{{8}}T\d{{6}}Z-[0-9a-f]+-\d+\.parquet")
REMOVE = "remove"
TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("received", TIME),
        ("user_id", pa.string()),
        ("item_id", pa.string()),
        ("timestamp", TIME),
        ("type", pa.string()),
        ("value", pa.float64()),
        ("event_id", pa.string()),
        ("event_key", pa.uint64()),
        ("correction", pa.string()),
    ],
    metadata={FORMAT_KEY: FORMAT},
)


def is_event_log(path: Path) -> bool:
    """Whether a path is the folder of an event log, and neither a file nor plain parts."""
    if not path.is_dir():
        return False
    for file in path.glob(PATTERN):
        if LOG_NAME.fullmatch(file.name):
            return True
        try:
            if FORMAT_KEY.encode() in (pq.read_schema(file).metadata or {}):
                return True
        except (pa.ArrowException, OSError, ValueError):
            continue  # whoever reads it says so
    return False


def read_event_files(folder: Path, since_us: int | None = None) -> pa.Table:
    """Returns the rows of a folder's files, in the order in which servers received them.

    Args:
        folder: Folder of an event log.
        since_us: Time in microseconds; only rows that were received then or later. None: all.

    Raises:
        SchemaError: If the folder has no file of an event log, or one that cannot be read.
    """
    table = pa.concat_tables(
        [read_log_file(path, SCHEMA, FORMAT) for path in event_file_paths(folder)]
    )
    if since_us is not None:
        table = table.filter(pc.greater_equal(table.column("received"), pa.scalar(since_us, TIME)))
    return table.take(pa.array(np.argsort(received_us(table), kind="stable")))


def event_file_paths(folder: Path) -> list[Path]:
    """Returns the files of a folder in the order of their names' times. Raises SchemaError."""
    paths = sorted(folder.glob(PATTERN), key=lambda path: path.name.split("-")[1:])
    if not paths:
        raise SchemaError(f"{folder}: is a folder without {PATTERN}; expected that of an event log")
    return paths


def read_event_chunks(folder: Path) -> Iterator[pa.Table]:
    """Yields the rows of `read_event_files` in its order, with few files in memory.

    A row waits until all files have been read that may have an older one. These are the files
    whose first row is older; servers write a file a minute, so few of them overlap.

    Raises:
        SchemaError: As of `read_event_files`.
    """
    paths = event_file_paths(folder)
    firsts = np.array([_first_received(path) for path in paths], np.int64)
    held = np.zeros(0, np.int64)  # place of each waiting row among all rows, file after file
    waiting = SCHEMA.empty_table()
    sizes = np.cumsum([0, *(pq.read_metadata(path).num_rows for path in paths)])
    order = np.argsort(firsts, kind="stable")
    for number, place in enumerate(order.tolist()):
        table = read_log_file(paths[place], SCHEMA, FORMAT)
        waiting = pa.concat_tables([waiting, table])
        held = np.concatenate([held, sizes[place] + np.arange(table.num_rows)])
        received = received_us(waiting)
        ready = np.ones(held.size, bool)
        if number + 1 < order.size:
            ready = received < firsts[order[number + 1]]
        chosen = np.flatnonzero(ready)
        chosen = chosen[np.lexsort((held[chosen], received[chosen]))]
        if chosen.size:
            yield waiting.take(pa.array(chosen)).combine_chunks()
        waiting, held = waiting.filter(pa.array(~ready)).combine_chunks(), held[~ready]


def received_us(table: pa.Table) -> np.ndarray:
    """Returns [n] int64 the times at which rows were received, 0 for none."""
    return np.asarray(pc.fill_null(table.column("received").cast(pa.int64()), 0).to_numpy())


def _first_received(path: Path) -> int:
    """Returns the time of a file's oldest row; of an empty file the largest number."""
    try:
        table = pq.read_table(path, columns=["received"], partitioning=None)
        received = received_us(table.cast(pa.schema([SCHEMA.field("received")])))
    except (pa.ArrowException, KeyError, OSError) as error:
        raise SchemaError(f"{path}: is no file of an event log ({error})") from None
    return int(received.min()) if received.size else np.iinfo(np.int64).max


def read_log_file(
    path: Path, schema: pa.Schema, expected: str, added: Collection[str] = ()
) -> pa.Table:
    """Returns the rows of a file of the event log or the slate log.

    Args:
        path: The file.
        schema: Its columns.
        expected: Name and number of its format.
        added: Columns that older files of this format lack; they are null then.

    Raises:
        SchemaError: If it is damaged, of another version, or no such file.
    """
    try:
        table = pq.read_table(path, partitioning=None)
        check_metadata(table.schema.metadata, expected, path)
        for name in set(added).intersection(schema.names).difference(table.schema.names):
            table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
        names = table.schema.names
        for name in {*names, *schema.names}:
            if name not in names or name not in schema.names:
                what = "unknown" if name in names else "missing"
                raise SchemaError(f"{path}: column {name} is {what}; expected {expected}")
        return table.select(schema.names).cast(schema)
    except UnreadableFile as error:
        raise SchemaError(str(error)) from None
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"{path}: is no file of {expected} ({error})") from None


def event_keys(ids: pa.Array) -> np.ndarray:
    """Returns [n] uint64 the key of each event id; 0 for none."""
    coded = ids.dictionary_encode()
    keys = [0 if text is None else event_key(text) for text in coded.dictionary.to_pylist()]
    table = np.array([*keys, 0], np.uint64)
    return np.asarray(table[pc.fill_null(coded.indices, len(keys)).to_numpy(zero_copy_only=False)])
