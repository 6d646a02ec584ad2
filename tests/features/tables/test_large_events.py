"""Events read in chunks and buckets are those of a reading at once, in every kind of file."""

import csv
import errno
import json
import random
import re
from itertools import pairwise
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
    input_table,
    large_events,
    mapped_arrays,
    text_files,
)
from recserve.features.tables.event_rows import COLUMNS, EventRows
from recserve.features.tables.input_table import InputTable
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import SchemaError
from tests.support.input_parts import part_names

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
def whole_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns the files that were read at once, so far."""
    paths: list[Path] = []

    def note(path: Path, *args: Any, read: Any = input_table.read_input) -> Any:
        paths.append(path)
        return read(path, *args)

    monkeypatch.setattr(input_table, "read_input", note)
    return paths


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
def test_chunks_read_as_a_whole(
    tmp_path: Path, small: Any, whole_reads: list[Path], seed: int
) -> None:
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
    whole_reads.clear()
    assert read(paths, policy, valued) == whole
    assert len(whole) > 2 or not whole_reads  # what is refused is not read at once


def write_parts(
    folder: Path, kind: str, rows: list[dict[str, Any]], draw: random.Random
) -> tuple[Path, dict[str, int]]:
    """Writes rows as the parts of a folder and of its sub-folders, and as one file beside it.

    Returns:
        The file, and the rows before each part by the name of its file.
    """
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    cuts = sorted(draw.randrange(len(rows) + 1) for _ in range(draw.choice([0, 1, 4])))
    starts = [0, *cuts]
    parts = [rows[first:last] for first, last in zip(starts, [*cuts, len(rows)], strict=True)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    paths = [folder / name for name in part_names(draw, len(parts), kind)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    whole = folder.parent / f"whole.{kind}"
    if kind == "parquet":
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table, whole)
        for number, (first, part) in enumerate(zip(starts, parts, strict=True)):
            one = table.slice(first, len(part))
            for place, name in enumerate(names):
                if one[name].null_count == len(part) and draw.random() < 0.5:
                    one = one.set_column(place, name, pa.nulls(len(part)))
            order = draw.sample(names, len(names)) if number else names
            pq.write_table(one.select(order), paths[number])
    else:
        lines = [
            ",".join("" if row.get(name) is None else str(row[name]) for name in names)
            if kind == "csv"
            else json.dumps({k: v for k, v in row.items() if v is not None or draw.random() < 0.5})
            for row in rows
        ]
        if kind == "csv" and draw.random() < 0.3:
            for place in draw.sample(range(len(lines)), min(3, len(lines))):
                lines[place] += ",more"
        head = [",".join(names)] if kind == "csv" else []
        whole.write_text("\n".join([*head, *lines]) + "\n")
        for path, first, part in zip(paths, starts, parts, strict=True):
            own = [*head, *lines[first : first + len(part)]]
            path.write_text("".join(f"{line}\n" for line in own))
    return whole, {path.name: first for path, first in zip(paths, starts, strict=True)}


def of_whole(text: str, folder: Path, whole: Path, starts: dict[str, int]) -> str:
    """Returns a message about parts as one about the whole file."""
    lines = []
    for line in text.splitlines():
        found = re.search(rf"{re.escape(str(folder))}/[\w=/]*(part-[0-9]+\.\w+)", line)

        def place(row: re.Match[str], part: str = found[1] if found else "") -> str:
            return f"{row[1]} {int(row[2]) + starts[row[4] or part]}"

        if found:
            line = re.sub(r"\b(row|line) ([0-9]+)\b( of [\w=/]*(part-[0-9]+\.\w+))?", place, line)
            line = line.replace(found[0], str(whole))
        lines.append(line.replace(str(folder), str(whole)))
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(45))
def test_a_folder_of_parts_is_one_file(
    tmp_path: Path, small: Any, whole_reads: list[Path], seed: int
) -> None:
    """Parts of each kind read, and are refused, as the file that has their rows in order."""
    draw = random.Random(seed)
    kind = ("parquet", "csv", "jsonl")[seed % 3]
    share = draw.choice([0, 0, 0.02, 0.1])
    rows = drawn_rows(draw, draw.choice([1, 60, 150]), share)
    rows = [{k: None if v == "" else v for k, v in row.items()} for row in rows]
    if draw.random() < 0.3:
        name = draw.choice(list(COLUMN_FAULTS))
        for n, row in enumerate(rows):
            row[name] = COLUMN_FAULTS[name](n, row)
            row[name] = str(row[name]) if (kind, name) == ("parquet", "value") else row[name]
    folder = tmp_path / "events"
    whole, starts = write_parts(folder, kind, rows, draw)
    policy, valued = draw.choice(["error", "skip", "skip"]), draw.choice([(), ("click",)])
    joined = draw.random() < 0.3  # beside another file, which joins events by their ids
    more = [write_file(tmp_path / "more", "csv", drawn_rows(draw, 20, 0), draw)] if joined else []

    def compare() -> bool:
        found, expected = (read([path, *more], policy, valued) for path in (folder, whole))
        if len(found) == 2:
            message = of_whole(found[1], folder, whole, starts)
            assert (found[0], message) == expected
            return True
        *content, report, columns = found
        file, num_rows, dropped, notes, examples = report
        file, *examples = (of_whole(one, folder, whole, starts) for one in (file, *examples))
        # An example of one of several files names the file before the part.
        examples = [one.replace(f"{whole}: {whole}: ", f"{whole}: ") for one in examples]
        if not more:
            examples = [one.removeprefix(f"{whole}: ") for one in examples]
        report = (file, num_rows, dropped, notes, tuple(examples))
        # A name of folders is no column, and the report says so.
        named = [one.name for one in columns if one.type == "name of folders"]
        assert set(named) == {one for one in "ab" if any(folder.rglob(f"{one}=*"))}
        columns = tuple(one for one in columns if one.name not in named)
        assert (*content, report, columns) == expected
        return False

    compare()
    small()
    whole_reads.clear()
    refused = compare()
    assert not (refused and whole_reads)


FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "kinds": ({"a.csv": "user_id\n", "b.jsonl": "{}\n"}, "events: has parts of several kinds"),
    "log": (
        {"a/events-20261129T000000Z-1-1.parquet": "", "b/c.parquet": ""},
        "events/a: is an event log inside a folder of parts; name each event log by itself",
    ),
    "deep kinds": (
        {"a=1/x.csv": "user_id\n", "a=2/x.jsonl": "{}\n"},
        "events: .* a=1/x.csv is CSV, a=2/x.jsonl is JSON lines; expected one kind",
    ),
    "packed": ({"a.csv": "user_id\n", "b.csv.gz": ""}, "events/b.csv.gz: .*unpack it first"),
    "nothing": ({"_SUCCESS": "", ".hidden": "x"}, "events: is an empty folder; expected parts"),
    "columns": (
        {"a.csv": "user_id,item_id,position\na,i0,1\n", "b.csv": "user_id,item\na,i1\n"},
        "events/b.csv: lacks item_id, position and has item, unlike a.csv; expected parts",
    ),
    "missing": (
        {"a.csv": "user_id,position\na,1\n", "b.csv": "user_id,position\na,2\n"},
        "events/a.csv: column item_id .* is missing; the file has user_id",
    ),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_not_one_file_is_refused(
    tmp_path: Path, small: Any, name: str, large: bool
) -> None:
    files, message = FOLDERS[name]
    for file, text in files.items():
        path = tmp_path / "events" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if large:
        small()
    with pytest.raises(SchemaError, match=message):
        event_table.read_events(tmp_path / "events", ITEMS)
    assert re.search(message, event_table.find_problems(tmp_path / "events")[0])


def test_a_link_to_a_folder_of_parts_is_refused(tmp_path: Path) -> None:
    """A folder that links to itself would have no end."""
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "more").symlink_to(tmp_path / "events")
    with pytest.raises(SchemaError, match="events/more: is a link to a folder; expected a file"):
        event_table.read_events(tmp_path / "events", ITEMS)


@pytest.mark.parametrize("large", [False, True])
def test_parts_of_other_types_are_refused(tmp_path: Path, small: Any, large: bool) -> None:
    """Types that hold those of all parts are taken; `events-*` alone makes no event log."""
    folder = tmp_path / "events"
    folder.mkdir()
    times = [pa.array([n, n + 1], pa.int64() if n % 2 else pa.int32()) for n in (1, 3, 6)]
    for number, positions in enumerate(times):
        table = pa.table({"user_id": ["a", "b"], "item_id": ["i1", "i2"], "position": positions})
        pq.write_table(table, folder / f"events-{number}.parquet")
    if large:
        small()
    log, _ = event_table.read_events(folder, ITEMS)
    assert log.times.tolist() == [1, 3, 6, 2, 4, 7]
    table = table.set_column(2, "position", pa.array(["x", "y"]))
    pq.write_table(table, folder / "events-3.parquet")
    with pytest.raises(SchemaError, match="events-3.parquet: column position is string, and int64"):
        event_table.read_events(folder, ITEMS)


# Lines that make a file unreadable as a whole, or a column of it, beside others like `LINE`.
LINE = '{"user_id": "a", "item_id": "i1", "position": %d, "n": 1}'
BROKEN_LINES = (
    "{",
    "[1]",
    '{"n": "text"}',
    '{"n": 99999999999999999999, "user_id": 1.5}',
    '{"n": {"deep": [1]}}',
    '{"position": "none", "item_id": true}',
    "{}",
)


@pytest.mark.parametrize("seed", range(16))
def test_lines_that_cannot_be_read_are_named_alike(
    tmp_path: Path, small: Any, whole_reads: list[Path], seed: int
) -> None:
    """Of a large file or folder, the fault that a reading at once finds is named."""
    draw = random.Random(seed)
    lines = [LINE % n for n in range(draw.choice([0, 20, 120]))]
    for _ in range(draw.choice([1, 2])):
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(BROKEN_LINES))
    path = tmp_path / "events.jsonl"
    if seed % 2:
        path = tmp_path / "events"
        path.mkdir()
    cuts = [0, draw.randrange(len(lines) + 1), len(lines)] if path.is_dir() else [0, len(lines)]
    for part, (first, last) in enumerate(pairwise(cuts)):
        file = path / f"{part}.jsonl" if path.is_dir() else path
        file.write_text("".join(f"{line}\n" for line in lines[first:last]))
    whole = read([path], "error", ())
    small()
    whole_reads.clear()
    assert read([path], "error", ()) == whole
    assert len(whole) > 2 or not whole_reads


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
