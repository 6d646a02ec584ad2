"""Events read in chunks and buckets are those of a reading at once, in every kind of file."""

import csv
import errno
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.features.history.history import event_key
from recserve.features.tables import (
    event_files,
    event_table,
    large_events,
    mapped_arrays,
    text_files,
)
from recserve.features.tables.event_rows import COLUMNS, EventRows
from recserve.features.tables.input_table import InputTable
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import SchemaError

NAMES = [f"i{n}" for n in range(9)]
ITEMS = ItemTable(NAMES, [""] * 9, [[]] * 9, pa.table({}))
START = 1_700_000_000
KINDS = ("parquet", "csv", "jsonl", "log")
# Faults of a row, and of a whole column.
ROW_FAULTS: dict[str, tuple[Any, ...]] = {
    "user_id": (None, "", "x" * 300, "é" * 250),
    "item_id": (None, "gone", ""),
    "timestamp": (None,),
    "type": (" ", "x" * 300),
    "value": (1e300,),
}
COLUMN_FAULTS: dict[str, Any] = {
    "timestamp": lambda n, row: (START + n) * (1 if n % 40 < 39 else 1000),
    "value": lambda n, row: "some" if n % 30 == 29 else 1,
    "user_id": lambda n, row: 1.5,
    "item_id": lambda n, row: True,
}


def drawn_rows(draw: random.Random, number: int, share: float) -> list[dict[str, Any]]:
    """Returns rows of events of few users, of which a share has a fault or repeats another."""
    rows: list[dict[str, Any]] = []
    has_values, half_values = draw.random() < 0.7, draw.random() < 0.5
    for n in range(number):
        row: dict[str, Any] = {
            "user_id": f"u{draw.randrange(12)}",
            "item_id": draw.choice(NAMES),
            "timestamp": START + n // 2 + draw.randrange(-3, 4),
            "type": draw.choice(["click", "buy", None]),
            "event_id": draw.choice([None, f"e{draw.randrange(number)}"]),
        }
        if has_values:
            row["value"] = draw.randrange(5) + (0.5 if half_values and draw.random() < 0.2 else 0)
            row["value"] = None if n < number // 3 else row["value"]
        if draw.random() < share:
            name = draw.choice(list(ROW_FAULTS))
            row[name] = draw.choice(ROW_FAULTS[name])
        elif rows and draw.random() < share:
            row = dict(draw.choice(rows))
        rows.append(row)
    return rows


def write_file(path: Path, kind: str, rows: list[dict[str, Any]], draw: random.Random) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = {name: [row.get(name) for row in rows] for name in names}
    if kind == "parquet":
        path = path.with_suffix(".parquet")
        columns = {name: pa.array(values, from_pandas=False) for name, values in table.items()}
        pq.write_table(pa.table(columns), path, row_group_size=draw.choice([7, 1000]))
    elif kind == "csv":
        path = path.with_suffix(".csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([names, *([row.get(name) for name in names] for row in rows)])
    elif kind == "jsonl":
        path = path.with_suffix(".jsonl")
        lines = [
            {k: v for k, v in row.items() if v is not None or draw.random() < 0.5} for row in rows
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        path.mkdir()
        received = [START * 10**6 + draw.randrange(1000) for _ in rows]
        for part in range(3):
            chosen = []
            for place in sorted(range(part, len(rows), 3), key=lambda p: received[p]):
                row = rows[place]
                known = row["event_id"] or f"{row['item_id']} {row['timestamp']} {row['type']}"
                gone = row["event_id"] is not None and draw.random() < 0.1
                chosen.append(
                    {
                        **row,
                        "timestamp": None if row["timestamp"] is None else row["timestamp"] * 10**6,
                        "received": received[place],
                        "event_key": event_key(known),
                        "correction": "remove" if gone else None,
                    }
                )
            file = path / f"{event_files.KIND}-2026112{part}T000000Z-{part}-1.parquet"
            pq.write_table(pa.Table.from_pylist(chosen, schema=event_files.SCHEMA), file)
    return path


def read(paths: list[Path], policy: str, valued: tuple[str, ...]) -> Any:
    """Returns everything that a reading gives, or how it ends."""
    try:
        log, report = event_table.read_events(paths, ITEMS, policy, valued=valued)  # type: ignore[arg-type]
    except ValueError as error:
        return type(error), str(error)
    parts = (log.offsets, log.item_rows, log.times, log.types, log.values)
    return (
        log.user_ids,
        [(part.dtype, part.tolist()) for part in parts],
        (log.type_names, log.has_timestamps),
        (report.file, report.num_rows, report.dropped, report.notes, report.examples),
        report.columns,
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what makes chunks, buckets and arrays in memory so small that all are divided."""

    def shrink() -> None:
        monkeypatch.setattr(large_events, "ROWS_IN_MEMORY", -1)
        monkeypatch.setattr(large_events, "CHUNK_ROWS", 23)
        monkeypatch.setattr(large_events, "BUCKET_ROWS", 40)
        monkeypatch.setattr(text_files, "CHUNK_LINES", 31)
        monkeypatch.setattr(text_files, "BLOCK_BYTES", 1500)
        monkeypatch.setattr(mapped_arrays, "BLOCK_ROWS", 17)
        monkeypatch.setattr(mapped_arrays, "IN_MEMORY_BYTES", 100)

    return shrink


@pytest.mark.parametrize("seed", range(48))
def test_chunks_read_as_a_whole(tmp_path: Path, small: Any, seed: int) -> None:
    """Files of all kinds, alone and together, valid and with faults of rows and of columns."""
    draw = random.Random(seed)
    share = draw.choice([0, 0, 0.02, 0.1])
    kinds = [KINDS[seed % 4]] * draw.choice([1, 1, 3]) + draw.sample(KINDS, draw.choice([0, 0, 2]))
    paths = []
    for number, kind in enumerate(kinds):
        rows = drawn_rows(draw, draw.choice([1, 60, 150]), share)
        if draw.random() < 0.2 and kind != "log":
            name = draw.choice(list(COLUMN_FAULTS))
            for n, row in enumerate(rows):
                row[name] = COLUMN_FAULTS[name](n, row)
            if kind == "parquet" and name == "value":
                rows = [row | {"value": str(row["value"])} for row in rows]
        if draw.random() < 0.2 and kind != "log":
            for n, row in enumerate(rows):
                row["position"] = n if draw.random() > share else 3
                if len(kinds) == 1 or draw.random() < 0.01:
                    row.pop("timestamp")
        paths.append(write_file(tmp_path / f"f{number}", kind, rows, draw))
    policy = draw.choice(["error", "skip", "skip"])
    valued = draw.choice([(), ("click",)])
    whole = read(paths, policy, valued)
    small()
    assert read(paths, policy, valued) == whole


@pytest.mark.parametrize("seed", range(24))
def test_columns_that_cannot_be_used_are_named_alike(tmp_path: Path, small: Any, seed: int) -> None:
    """What a build says of events beside wrong items is what a reading of them says."""
    draw = random.Random(seed)
    rows = drawn_rows(draw, 120, 0)
    name = draw.choice([*COLUMN_FAULTS, None])
    for n, row in enumerate(rows if name else ()):
        row[name] = COLUMN_FAULTS[name](n, row)  # type: ignore[index]
    kind = ("csv", "jsonl")[seed % 2]
    path = write_file(tmp_path / "events", kind, rows, draw)
    expected = []
    try:
        EventRows.of(InputTable(path, COLUMNS), ITEMS)
    except SchemaError as error:
        expected.append(str(error))
    small()
    assert event_table.find_problems(path) == expected


@pytest.mark.parametrize("door", ["bucket", "array"])
def test_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Any, door: str
) -> None:
    path = write_file(tmp_path / "events", "parquet", drawn_rows(random.Random(1), 150, 0), random)  # type: ignore[arg-type]
    small()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if door == "bucket":
        monkeypatch.setattr(large_events.pa.ipc, "new_stream", fail)
    else:
        monkeypatch.setattr(mapped_arrays.os, "posix_fallocate", fail)
    with pytest.raises(mapped_arrays.NoRoomError, match="No space .* set TMPDIR"):
        event_table.read_events(path, ITEMS, "skip")


@pytest.mark.parametrize("seed", range(4))
def test_blocks_select_and_count_as_a_whole(small: Any, seed: int) -> None:
    draw = np.random.default_rng(seed)
    size = int(draw.integers(0, 200))
    values, kept = draw.random(size).astype(np.float32), draw.random(size) < 0.5
    places = np.sort(draw.integers(0, size + 1, 30))
    rows = draw.integers(0, 7, size).astype(np.int32)
    whole = (
        values[kept],
        np.concatenate([[0], np.cumsum(kept)])[places],
        np.bincount(rows, minlength=7),
        np.bincount(rows, values, 7),
    )
    small()
    found = (
        mapped_arrays.take_where(values, kept),
        mapped_arrays.counts_before(kept, places),
        mapped_arrays.sum_by_row(rows, 7),
        mapped_arrays.sum_by_row(rows, 7, values),
    )
    for one, expected in zip(found, whole, strict=True):
        assert np.array_equal(one, expected)
