"""Build converts what is unambiguous, refuses the rest, and every hint it gives works."""

import datetime
import decimal
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recserve.batch.generate import check_schema
from recserve.bounds import MAX_TIME_US, MIN_TIME_US
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable, read_items
from recserve.features.tables.parquet import BadRowError, BadRows, SchemaError

UTC = datetime.UTC
IDS = [f"i{n}" for n in range(12)]
ITEMS = ItemTable(IDS, [""] * 12, [[] for _ in IDS], pa.table({}))
UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}


def read(folder: Path, timestamp: Any, on_bad_rows: Any = "error") -> tuple[EventLog, BadRows]:
    """Reads one user's events with the given times, an item each."""
    count = len(timestamp)
    table = pa.table({"user_id": ["u"] * count, "item_id": IDS[:count], "timestamp": timestamp})
    pq.write_table(table, folder / "events.parquet")
    return read_events(folder / "events.parquet", ITEMS, on_bad_rows)


def use(report: BadRows, name: str) -> str:
    (found,) = (column.use for column in report.columns if column.name == name)
    return found


def draw_times(seed: int) -> list[int]:
    """Ascending microseconds of the years 1973 to 2255, the ends included."""
    drawn = random.Random(seed)
    ends = [10**14, MAX_TIME_US - 10**6]
    return sorted([*ends, *(drawn.randrange(10**14, MAX_TIME_US - 10**6) for _ in range(8))])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", ["int64", "uint64", "double", "decimal", "string", "dictionary"])
def test_numbers_since_1970_are_told_by_their_size(tmp_path: Path, unit: str, kind: str) -> None:
    per_s = UNITS[unit]
    numbers = [time_us * per_s // 10**6 for time_us in draw_times(per_s % 97)]
    if kind == "double":
        numbers = [int(float(number)) for number in numbers]
    column = pa.array(numbers, pa.int64())
    if kind == "decimal":
        column = pa.array([decimal.Decimal(n) for n in numbers], pa.decimal128(20, 0))
    elif kind == "dictionary":
        column = column.cast(pa.string()).dictionary_encode()
    else:
        column = column.cast(kind, safe=False)
    log, report = read(tmp_path, column)
    expected = np.array([n * 10**6 // per_s for n in numbers])
    # Nanoseconds beyond 2^53 are exact as integers only.
    most = 1 if kind in ("double", "decimal") else 0
    assert np.abs(log.times - expected).max() <= most
    assert f"read as {unit} since 1970" in use(report, "timestamp")


@pytest.mark.parametrize("kind", [pa.float64(), pa.string()])
def test_fractions_of_seconds_are_kept(tmp_path: Path, kind: Any) -> None:
    seconds = [1_700_000_000.25, 1_700_000_000.5, 1_700_000_001.123456]
    column = pa.array([f"{s:.6f}" for s in seconds]).cast(kind)
    log, _ = read(tmp_path, column)
    assert log.times.tolist() == [round(s * 1e6) for s in seconds]


FORMS = {
    "text read as RFC 3339": lambda t: [
        *(t.isoformat().replace("+00:00", zone) for zone in ("Z", "z", "+00:00", "+0000")),
        t.astimezone(datetime.timezone(datetime.timedelta(hours=-5))).isoformat(),
        t.isoformat(" ").replace("+00:00", "Z"),
        t.isoformat().replace("T", "t").replace("+00:00", "z"),
        t.isoformat().replace("+00:00", "000Z"),  # nanoseconds
    ],
    "text without a time zone read as UTC": lambda t: [
        t.replace(tzinfo=None).isoformat(),
        t.replace(tzinfo=None).isoformat(" "),
    ],
}


@pytest.mark.parametrize("note", FORMS)
def test_iso_text_is_read(tmp_path: Path, note: str) -> None:
    drawn = random.Random(5)
    moment = datetime.datetime(2026, 3, 4, 5, 6, 7, drawn.randrange(1, 10**6), UTC)
    texts = FORMS[note](moment)
    log, report = read(tmp_path, texts)
    assert log.times.tolist() == [round(moment.timestamp() * 1e6)] * len(texts)
    assert use(report, "timestamp") == f"times; {note}"


@pytest.mark.parametrize("kind", [pa.string(), pa.date32(), pa.date64()], ids=str)
def test_dates_are_midnight(tmp_path: Path, kind: Any) -> None:
    log, report = read(tmp_path, pa.array(["2026-01-01", "2026-01-02"]).cast(kind))
    assert log.times.tolist() == [1_767_225_600_000_000, 1_767_312_000_000_000]
    assert "midnight UTC" in use(report, "timestamp")


S, MS = 1_700_000_000, 1_700_000_000_000
ISO_Z, ISO, DAY = "2026-01-01T00:00:00Z", "2026-01-01T00:00:00", "2026-01-01"


@pytest.mark.parametrize(
    "values",
    [
        [S, MS],
        [MS, MS * 1000],
        [MS * 1000, MS * 10**6],
        [float(S), float(MS)],
        [str(S), str(MS)],
        [ISO_Z, ISO],
        [ISO, DAY],
        [DAY, ISO_Z],
    ],
    ids=str,
)
@pytest.mark.parametrize("on_bad_rows", ["error", "skip"])
def test_mixed_units_are_refused(tmp_path: Path, values: Any, on_bad_rows: str) -> None:
    with pytest.raises(SchemaError, match=r"timestamp mixes .* \(row 0: .*\(row 1: .*alike"):
        read(tmp_path, values, on_bad_rows)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_within_the_bounds_are_read_in_every_unit(tmp_path: Path, unit: str) -> None:
    """The first and the last time that the unit can say are read; one unit further is not."""
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    first, end = (-(-bound * per_s // 10**6) for bound in (MIN_TIME_US, MAX_TIME_US))
    raw = [first - 1, first, S * per_s, min(end - 1, 2**63 - 1), min(end, 2**63 - 1)]
    inside = [value for value in raw if first <= value < end]
    log, report = read(tmp_path, pa.array(raw, pa.timestamp(unit)), "skip")
    assert log.times.tolist() == sorted(value * 10**6 // per_s for value in inside)
    assert report.dropped == {"timestamp out of range": len(raw) - len(inside)}


@pytest.mark.parametrize(
    "values",
    [
        [S, -1, S + 1],
        [S, 0, S + 1],
        [MS, 10**10, MS + 1],
        [float(S), 0.5, S + 1.0],
        [float(S), float("inf"), S + 1.0],
        [ISO_Z, "soon", ISO_Z],
        [ISO_Z, "2026-02-30T00:00:00Z", ISO_Z],
        [ISO_Z, "0001-01-01T00:00:00+05:00", ISO_Z],
        [ISO_Z, "9999-12-31T00:00:00Z", ISO_Z],
        pa.array([S, -1, S + 1], pa.timestamp("s")),
        pa.array([S, MS, S + 1], pa.timestamp("s")),
        pa.array([S, 2**52, S + 1], pa.timestamp("s")),
        pa.array([S, -(2**52), S + 1], pa.timestamp("s", "Europe/Paris")),
        pa.array([MS, 2**62, MS + 1], pa.timestamp("ms")),
        pa.array([S * 10**9, 2**63 - 1, S * 10**9 + 10**9], pa.timestamp("ns")),
    ],
    ids=lambda values: str(values)[:40],
)
def test_a_time_out_of_range_is_a_bad_row(tmp_path: Path, values: Any) -> None:
    with pytest.raises(BadRowError, match="column timestamp, row 1: .*timestamp out of range"):
        read(tmp_path, values)
    log, report = read(tmp_path, values, "skip")
    assert log.num_events == 2 and report.dropped == {"timestamp out of range": 1}


@pytest.mark.parametrize("values", [[1, 2], [True, False], ["soon", "later"], [[S], [S]]], ids=str)
def test_what_is_no_time_is_refused(tmp_path: Path, values: Any) -> None:
    with pytest.raises(SchemaError, match="column timestamp is .*expected timestamp"):
        read(tmp_path, values, "skip")


def test_seconds_that_are_rounded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="is float, which rounds times"):
        read(tmp_path, pa.array(np.array([S, S + 200], np.float32)))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1.0, 2.0, None], ["1", "2"]),
        (pa.array([1, 2**24, None], pa.float32()), ["1", str(2**24)]),
        (pa.array([decimal.Decimal(7), None, None], pa.decimal128(38, 0)), ["7"]),
        (pa.array([decimal.Decimal("7.00"), None, None], pa.decimal128(10, 2)), ["7"]),
        (pa.array([b"0056", None, None]), ["0056"]),
        (pa.array([3, 4, None]).dictionary_encode(), ["3", "4"]),
        (pa.array(["x", "y", None]).dictionary_encode(), ["x", "y"]),
    ],
    ids=str,
)
def test_ids_are_digits_or_text(tmp_path: Path, ids: Any, expected: list[str]) -> None:
    pq.write_table(pa.table({"item_id": ids}), tmp_path / "items.parquet")
    items, _ = read_items(tmp_path / "items.parquet", "skip")
    assert items.ids == expected


@pytest.mark.parametrize(
    "ids",
    [[0.5, 1.0], [2.0**54], [float("inf")], pa.array([2.0**25], pa.float32()), [b"\xff"], [[1]]],
    ids=str,
)
def test_other_ids_are_refused(tmp_path: Path, ids: Any) -> None:
    pq.write_table(pa.table({"item_id": ids}), tmp_path / "items.parquet")
    with pytest.raises(SchemaError, match="column item_id is .*expected string or integer"):
        read_items(tmp_path / "items.parquet", "skip")


# Text files -------------------------------------------------------------------------------------

ROWS = [
    {"item_id": "0056", "title": "Löffel, groß", "price": 1.5, "stock": 3, "new": True},
    {"item_id": "56", "title": '12"\nPfanne', "price": 2.0, "stock": 4, "new": False},
    {"item_id": "007", "title": None, "price": None, "stock": None, "new": None},
]


def write_items(path: Path, bom: bool, delimiter: str) -> Path:
    if path.suffix == ".jsonl":
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    else:
        frame = pd.DataFrame(ROWS).astype({"stock": "Int64"})
        point = "," if delimiter == ";" else "."
        content = frame.to_csv(index=False, sep=delimiter, decimal=point)
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + content.encode())
    return path


@pytest.mark.parametrize("bom", [False, True])
@pytest.mark.parametrize(
    ("suffix", "delimiter"),
    [(".csv", ","), (".csv", ";"), (".csv", "\t"), (".tsv", "\t"), (".jsonl", ""), (".CSV", ";")],
)
def test_text_files_are_read_as_they_are(
    tmp_path: Path, suffix: str, delimiter: str, bom: bool
) -> None:
    items, _ = read_items(write_items(tmp_path / f"items{suffix}", bom, delimiter))
    assert items.ids == ["0056", "56", "007"]
    assert items.titles == ["Löffel, groß", '12"\nPfanne', ""]
    assert items.attributes.to_pylist() == [
        {name: row[name] for name in ("price", "stock", "new")} for row in ROWS
    ]


def test_codes_with_zeros_stay_text(tmp_path: Path) -> None:
    text = "item_id,zip,big,mixed,nothing\n1,0056,99999999999999999999,1,\n2,10115,1,x,\n"
    (tmp_path / "items.csv").write_text(text, encoding="utf-8")
    items, report = read_items(tmp_path / "items.csv")
    assert items.attributes.column("zip").to_pylist() == ["0056", "10115"]
    assert items.attributes.column("big").to_pylist() == ["99999999999999999999", "1"]
    assert items.attributes.column("mixed").to_pylist() == ["1", "x"]
    assert "nothing" not in items.attributes.column_names
    assert use(report, "nothing") == "ignored: no row has a value"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("times", [[S, S + 1], [MS, MS + 1], [ISO_Z, ISO_Z], [S + 0.5, S + 1.5]])
def test_events_are_equal_in_every_format(tmp_path: Path, suffix: str, times: list[Any]) -> None:
    rows = [
        {"user_id": "0056", "item_id": item, "timestamp": time, "type": "view", "value": value}
        for item, time, value in zip(["i1", "i2"], times, [2, 0.5], strict=True)
    ]
    path = tmp_path / f"events{suffix}"
    if suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "events.parquet")
    one, two = (read_events(p, ITEMS)[0] for p in (path, tmp_path / "events.parquet"))
    for name, value in vars(one).items():
        assert np.array_equal(getattr(two, name), value), name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", "not a readable CSV file"),
        ("x.csv", b"item_id,title\n", "no rows"),
        ("x.csv", b"item_id,item_id\na,b\n", "item_id appears more than once"),
        ("x.jsonl", b"", "no rows"),
        ("x.jsonl", b"{}\n{\n", "line 2: not JSON"),
        ("x.json", b'[{"item_id": 1}]', "line 1: expected one JSON object per line, got list"),
        ("x.jsonl", b'{"item_id": 1}\n{"item_id": "a"}\n', "item_id has values of several types"),
        ("x.jsonl", b'{"item_id": 1, "n": 99999999999999999999}', "column n, line 1: .* 64 bits"),
        ("x.csv", "item_id,title\na,b\n".encode("utf-16"), "iconv -f utf-16 -t utf-8 x.csv"),
        ("x.txt", b"item_id\n", "not a readable Parquet file"),
        ("x.csv.gz", b"\x1f\x8b", "expected Parquet, CSV or JSON lines; unpack it first"),
        ("x.XLSX", b"PK", "save it as CSV UTF-8"),
    ],
    ids=str,
)
def test_a_text_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SchemaError, match=message):
        read_items(tmp_path / name)


# Hints ------------------------------------------------------------------------------------------


Flags = dict[str, dict[str, str]]


def follow(message: str, table: pa.Table) -> tuple[pa.Table, Flags]:
    """Does what each line of a refusal says; returns the new table, and the flags that it names."""
    flags: Flags = {"split": {}, "columns": {}}
    for line in message.splitlines():
        if found := re.search(r"column (\w+) .*; convert it with (.*)", line):
            scope = {"pyarrow": pa, "column": table[found[1]]}
            place = table.column_names.index(found[1])
            table = table.set_column(place, found[1], eval(found[2], scope))
        else:
            given = re.findall(r"--(split|column) (\w+)=(\S+)", line)
            assert given, line
            for name, ours, value in given:
                value = column_named(line) if value == "NAME" else value.strip("'")
                flags["columns" if name == "column" else name][ours] = value
    return table, {name: values for name, values in flags.items() if values}


def column_named(line: str) -> str:
    found = re.search(r"column (\w+) ", line)
    assert found is not None, line
    return found[1]


VALUES = {
    "category": pa.array(["A|B", "C"]).dictionary_encode(),
    "text": pa.array(["A|B", "C"]),
    "semicolons": pa.array(["A;B", "C"], pa.large_string()),
    "one": pa.array(["A", "C"]),
    "ints": pa.array([1, 2]),
    "bools": pa.array([True, False]),
    "dates": pa.array([1, 2], pa.date32()),
    "times": pa.array([S, S + 1], pa.timestamp("s", "UTC")),
    "durations": pa.array([1, 2], pa.duration("s")),
    "floats": pa.array([0.5, 1.5]),
    "lists": pa.array([["A"], ["B"]]),
    "numbers": pa.array([[1], [2]]),
    "structs": pa.array([{"a": 1}, {"a": 2}]),
    "bytes": pa.array([b"\xff", b"x"]),
}


@pytest.mark.parametrize("column", ["item_id", "title", "categories"])
def test_a_hint_for_items_works(tmp_path: Path, column: str) -> None:
    """Whatever the column holds, a message with a hint is one that can be followed."""
    for kind in VALUES:
        follow_for_items(tmp_path, column, kind)


def follow_for_items(tmp_path: Path, column: str, kind: str) -> None:
    table = pa.table({"item_id": ["a", "b"], "size": [1, 2]} | {column: VALUES[kind]})
    path = tmp_path / "items.parquet"
    pq.write_table(table, path)
    try:
        read_items(path)
    except SchemaError as error:
        if "convert it" not in str(error) and "--split" not in str(error):
            return
        table, flags = follow(str(error), table)
        pq.write_table(table, path)
        items, _ = read_items(path, **flags)
        assert len(items) == 2
        if column == "categories" and kind in ("category", "text", "semicolons"):
            assert items.categories == [["A", "B"], ["C"]]


@pytest.mark.parametrize("column", ["user_id", "timestamp", "position", "type", "value"])
def test_a_hint_for_events_works(tmp_path: Path, column: str) -> None:
    for kind in VALUES:
        follow_for_events(tmp_path, column, kind)


def follow_for_events(tmp_path: Path, column: str, kind: str) -> None:
    clock = {} if column in ("timestamp", "position") else {"position": [0, 1]}
    table = pa.table(
        {"user_id": ["u", "u"], "item_id": ["i1", "i2"]} | clock | {column: VALUES[kind]}
    )
    path = tmp_path / "events.parquet"
    pq.write_table(table, path)
    try:
        read_events(path, ITEMS)
    except SchemaError as error:
        if not re.search("convert it|--column", str(error)):
            return
        table, flags = follow(str(error), table)
        pq.write_table(table, path)
        assert read_events(path, ITEMS, **flags)[0].num_events == 2
    except BadRowError as error:
        assert "--on-bad-rows skip" in str(error)


@pytest.mark.parametrize("column", ["user_id", "history", "strategy", "filter"])
def test_a_hint_of_a_batch_works(column: str) -> None:
    for values in VALUES.values():
        table = pa.table({"user_id": ["u", "v"]} | {column: values})
        try:
            check_schema(table.schema, Path("users.parquet"))
        except SchemaError as error:
            if "convert it" in str(error):
                check_schema(follow(str(error), table)[0].schema, Path("users.parquet"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("name", "title"),
        ("Title", "title"),
        ("titel", "title"),
        ("genres", "categories"),
        ("category", "categories"),
        ("catgories", "categories"),
    ],
)
def test_a_name_for_items_is_suggested(tmp_path: Path, given: str, meant: str) -> None:
    pq.write_table(pa.table({"item_id": ["a"], given: ["x"]}), tmp_path / "items.parquet")
    _, report = read_items(tmp_path / "items.parquet")
    assert f"attribute; did you mean {meant}? name it with --column {meant}={given}" in use(
        report, given
    )
    both = {"item_id": ["a"], given: ["x"], meant: [["x"]] if meant == "categories" else ["x"]}
    pq.write_table(pa.table(both), tmp_path / "items.parquet")
    assert use(read_items(tmp_path / "items.parquet")[1], given) == "attribute"


def test_all_problems_are_named_at_once_and_each_can_be_mended(tmp_path: Path) -> None:
    """The files of MovieLens, whose columns have other names, come through with one refusal."""
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n1,"A, b",X|Y\n2,B,(no genres listed)\n', encoding="utf-8"
    )
    (tmp_path / "ratings.csv").write_text(
        f"userId,movieId,rating,timestamp\n7,1,3.5,{S}\n7,2,4.0,{S - 9}\n", encoding="utf-8"
    )
    with pytest.raises(SchemaError) as refused:
        read_items(tmp_path / "movies.csv")
    _, flags = follow(str(refused.value), pa.table({}))
    items, report = read_items(tmp_path / "movies.csv", **flags)
    assert items.ids == ["1", "2"] and items.categories == [["X", "Y"], []]
    assert report.notes == {"categories '(no genres listed)' read as no category": 1}
    with pytest.raises(SchemaError) as refused:
        read_events(tmp_path / "ratings.csv", items)
    assert len(str(refused.value).splitlines()) == 3  # rating is one of them
    _, flags = follow(str(refused.value), pa.table({}))
    log, report = read_events(tmp_path / "ratings.csv", items, **flags)
    assert log.times.tolist() == [(S - 9) * 10**6, S * 10**6] and log.user_ids == ["7"]
    assert log.values.tolist() == [4.0, 3.5] and use(report, "rating") == "event values"
    assert report.notes == {"rows out of timestamp order, sorted": 1}


def test_columns_and_rows_name_every_problem(tmp_path: Path) -> None:
    wrong = {"user_id": [0.5], "item_id": ["i1"], "timestamp": [True], "value": ["x"]}
    pq.write_table(pa.table(wrong), tmp_path / "events.parquet")
    with pytest.raises(SchemaError) as schema:
        read_events(tmp_path / "events.parquet", ITEMS)
    for name in ("user_id", "timestamp", "value"):
        assert f"column {name} " in str(schema.value)
    bad = {
        "user_id": ["u", "u", "", "u"],
        "item_id": ["i1", "zz", "i1", "i2"],
        "timestamp": pa.array([S, S, S, -1], pa.timestamp("s")),
    }
    pq.write_table(pa.table(bad), tmp_path / "events.parquet")
    with pytest.raises(BadRowError) as rows:
        read_events(tmp_path / "events.parquet", ITEMS)
    for reason in ("null user_id", "unknown item_id", "timestamp out of range"):
        assert reason in str(rows.value)
    assert pc.sum(pa.array([line.count("--on-bad-rows") for line in rows.value.args])).as_py() == 1


@pytest.mark.parametrize(
    ("kind", "far"),
    [
        (pa.timestamp("ms"), MS * 1000),
        (pa.timestamp("us", "UTC"), MS * 10**6),
        (pa.timestamp("ms"), -MS * 1000),
        (pa.date32(), 4_000_000),
        (pa.date32(), -800_000),
    ],
    ids=str,
)
def test_an_attribute_that_no_answer_could_hold_is_a_bad_row(
    tmp_path: Path, kind: Any, far: int
) -> None:
    raw = pa.int32() if kind == pa.date32() else pa.int64()
    values = pa.array([1, far, None], raw).cast(kind)
    pq.write_table(pa.table({"item_id": IDS[:3], "since": values}), tmp_path / "items.parquet")
    with pytest.raises(BadRowError, match=r"column since, row 1: .*\(since out of range"):
        read_items(tmp_path / "items.parquet")
    items, _ = read_items(tmp_path / "items.parquet", "skip")
    assert [items.attribute(row)["since"] is None for row in (0, 1)] == [False, True]


@pytest.mark.parametrize("name", ["item_id", "title", "other"])
def test_a_column_that_cannot_be_divided_is_refused(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"item_id": ["a"], "title": ["x|y"]}), tmp_path / "items.parquet")
    with pytest.raises(SchemaError, match=f"column {name} .*--split names"):
        read_items(tmp_path / "items.parquet", split={name: "|"})


def test_attributes_are_divided_too(tmp_path: Path) -> None:
    table = pa.table({"item_id": ["a", "b"], "tags": ["x, y", None], "categories": [[], []]})
    pq.write_table(table, tmp_path / "items.parquet")
    items, report = read_items(tmp_path / "items.parquet", split={"tags": ","})
    assert items.attributes.column("tags").to_pylist() == [["x", "y"], None]
    assert use(report, "tags") == "attribute; text divided at ','"
    assert items.categories == [[], []]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.string()),
        pa.large_list(pa.large_string()),
        pa.list_(pa.string(), 2),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=str,
)
def test_lists_of_categories_of_any_kind(tmp_path: Path, kind: Any) -> None:
    paths = [["A", ""], ["B > C", "D"], [None, "E"]]
    table = pa.table({"item_id": IDS[:3], "categories": pa.array(paths).cast(kind)})
    pq.write_table(table, tmp_path / "items.parquet")
    items, report = read_items(tmp_path / "items.parquet")
    assert items.categories == [["A"], ["B > C", "D"], ["E"]]
    assert report.notes == {"empty category paths, left out": 1}
