"""Tables of any file kind and Arrow type come alike through every door, or are refused in words.

The doors are the items and events of a build, its vectors, and the input of batch jobs.
"""

import csv
import io
import json
import random
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from recserve.batch.generate import COLUMNS, Defaults, Generator
from recserve.batch.job import Job, check
from recserve.batch.prompt_columns import PROMPT_COLUMNS, check_prompts
from recserve.batch.rows import read_rows
from recserve.batch.source import partitions, read, scan
from recserve.bundle.building import BuildOptions
from recserve.cli.flags import column_names
from recserve.features.tables.event_table import read_events
from recserve.features.tables.items import read_items
from recserve.features.tables.parquet import BadRowError, SchemaError
from recserve.features.tables.plain_columns import MAX_COLUMNS
from recserve.features.vectors.vectors import read_vectors

START = 1_700_000_000
UUIDS = [str(uuid.UUID(int=n * 977 + 5)) for n in range(4)]
TEXTS = ["0056", "7", "ü", "x y"]
WIDE = [str(10**18 + 7 * n) for n in range(4)]
DIGITS = ["7", "56", "1000000007", "12"]


def extension(kind, storage):
    return pa.ExtensionArray.from_storage(kind, storage)


# Arrow columns of ids, and the texts that they stand for.
IDS = {
    "string": (pa.array(TEXTS), TEXTS),
    "large_string": (pa.array(TEXTS, pa.large_string()), TEXTS),
    "string_view": (pa.array(TEXTS, pa.string_view()), TEXTS),
    "binary": (pa.array([text.encode() for text in TEXTS]), TEXTS),
    "large_binary": (pa.array([text.encode() for text in TEXTS], pa.large_binary()), TEXTS),
    "dictionary": (pa.array(TEXTS).dictionary_encode(), TEXTS),
    "uuid": (pa.array([uuid.UUID(one).bytes for one in UUIDS], pa.uuid()), UUIDS),
    "opaque": (extension(pa.opaque(pa.string(), "id", "shop"), pa.array(TEXTS)), TEXTS),
    "int64": (pa.array(list(map(int, WIDE))), WIDE),
    "uint64": (
        pa.array([2**63 + n for n in range(4)], pa.uint64()),
        [str(2**63 + n) for n in range(4)],
    ),
    "int16": (pa.array([7, 56, -1, 12], pa.int16()), ["7", "56", "-1", "12"]),
    "double": (pa.array([float(one) for one in DIGITS]), DIGITS),
    "decimal128": (pa.array([Decimal(one) for one in WIDE], pa.decimal128(38, 2)), WIDE),
    "decimal256": (pa.array([Decimal(one) for one in WIDE], pa.decimal256(60, 0)), WIDE),
    "dictionary of numbers": (pa.array([7, 56, 1, 12]).dictionary_encode(), ["7", "56", "1", "12"]),
}


def write(path, columns, delimiter=","):
    """Writes columns as the suffix says; text files have the plain values."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return path
    rows = [
        dict(zip(columns, row, strict=True)) for row in zip(*map(plain, table.columns), strict=True)
    ]
    if path.suffix == ".csv":
        text = io.StringIO(newline="")
        out = csv.writer(text, delimiter=delimiter)
        out.writerow(columns)
        out.writerows(row.values() for row in rows)
        path.write_text(text.getvalue(), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def plain(column):
    """Values as a program writes them into text."""
    change = {bytes: bytes.decode, uuid.UUID: str, Decimal: int, float: int}
    return [change.get(type(value), lambda one: one)(value) for value in column.to_pylist()]


def bodies_of(path, **options):
    """Runs the rows of a batch job; returns the requests, and the reasons of rejected rows."""
    seen = []

    def recommend(bodies):
        seen.extend(bodies)
        return [ValueError("answered")] * len(bodies)

    plan = check(Job(path, path.parent / "out", **options))
    errors = []
    for part in plan.partitions:
        for table in read(part, 2, tuple(COLUMNS)):
            made = Generator(recommend, Defaults(k=5))(table)
            errors += [one for one in made.errors["reason"].to_pylist() if one != "answered"]
    return seen, errors


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_ids_of_any_type_are_the_same_texts_everywhere(tmp_path, kind, suffix):
    column, texts = IDS[kind]
    items, _ = read_items(write(tmp_path / f"items{suffix}", {"item_id": column}))
    assert items.ids == texts
    events = {"user_id": column, "item_id": column, "position": [1, 1, 1, 1]}
    log, report = read_events(write(tmp_path / f"events{suffix}", events), items)
    assert log.user_ids == texts and log.item_rows.tolist() == [0, 1, 2, 3]
    if kind == "uuid" and suffix == ".parquet":
        assert "UUIDs read as text" in report.columns[0].use
    vectors = {"item_id": column, "vector": [[float(n), 1.0] for n in range(4)]}
    if suffix == ".csv":
        return  # no text is a vector, and batch jobs read Parquet
    path = write(tmp_path / f"vectors{suffix}", vectors)
    assert read_vectors(path, texts[::-1])[:, 0].tolist() == [3, 2, 1, 0]
    if suffix == ".parquet":
        lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), column)
        rows, errors = bodies_of(
            write(tmp_path / "users.parquet", {"user_id": column, "history": lists})
        )
        assert errors == []
        assert [(row.user.id, row.history) for row in rows] == [(one, [one]) for one in texts]
        prompts = write(tmp_path / "prompts.parquet", {"custom_id": column, "prompt": TEXTS})
        assert check_prompts(scan(prompts, 10)) == ()


EMPTY = {
    "history": [
        pa.nulls(3),
        pa.array([[], None, []], pa.list_(pa.null())),
        pa.array([None] * 3, pa.list_(pa.string(), 2)),
        pa.array([None] * 3, pa.list_view(pa.string())),
    ],
    "k": [pa.nulls(3), pa.array([np.nan] * 3), pa.array([None] * 3, pa.decimal128(5, 2))],
    "strategy": [
        pa.nulls(3),
        pa.array([None] * 3, pa.string_view()),
    ],
    "exclude_seen": [pa.nulls(3), extension(pa.bool8(), pa.array([None] * 3, pa.int8()))],
    "filter": [pa.nulls(3), pa.array([None] * 3, pa.large_binary())],
    "diversity": [pa.nulls(3), pa.array([None] * 3, pa.large_binary())],
}


def test_a_batch_takes_columns_without_a_value_and_numbers_of_any_type(tmp_path):
    users = ["a", "b", "c"]
    default, _ = bodies_of(write(tmp_path / "users.parquet", {"user_id": users}))
    for name, columns in EMPTY.items():
        for column in columns:
            path = write(tmp_path / "users.parquet", {"user_id": users, name: column})
            rows, errors = bodies_of(path)
            assert errors == [] and len(rows) == 3
            if not (name == "history" and str(column.type) == "list<item: null>"):
                assert rows == default
    for column in (
        pa.array([2.0, np.nan, 2.5]),
        pa.array([Decimal(2), None, Decimal("2.5")], pa.decimal128(5, 1)),
    ):
        rows, errors = bodies_of(write(tmp_path / "users.parquet", {"user_id": users, "k": column}))
        assert [row.k for row in rows] == [2, 5] and len(errors) == 1 and "k: expected" in errors[0]


def test_prompts_take_columns_without_a_value(tmp_path):
    columns = {"prompt": ["x"] * 3} | {
        name: pa.nulls(3) for name in PROMPT_COLUMNS if name not in ("prompt", "messages")
    }
    columns |= {
        "max_tokens": pa.array([5.0, np.nan, 2.0]),
        "stop": pa.array([[]] * 3, pa.list_(pa.null())),
    }
    path = write(tmp_path / "prompts.parquet", columns)
    files = scan(path, 10)
    assert check_prompts(files) == ()
    (table,) = read(partitions(files, 10)[0], 10, PROMPT_COLUMNS)
    rows, wrong = read_rows(table, PROMPT_COLUMNS)
    assert wrong == {} and [row["max_tokens"] for row in rows] == [5, None, 2]


# Text that is no text ---------------------------------------------------------------------------

GOOD = {
    "items": {"item_id": TEXTS, "title": TEXTS, "brand": TEXTS},
    "events": {"user_id": TEXTS, "item_id": TEXTS, "type": TEXTS, "position": [1] * 4},
}


def spoil(path, columns, name, row, how):
    """Writes a file in which one text is broken."""
    if path.suffix == ".parquet":
        raw = [str(value).encode() for value in columns[name]]
        raw[row] += b"\xed\xa0\xbd" if how == "surrogate" else b"\xe9"
        column = pa.array(raw).view(pa.string())
        pq.write_table(pa.table(columns | {name: column}), path)
        return path
    mark = "\x7f"
    values = list(map(str, columns[name]))
    values[row] += mark
    write(path, columns | {name: values})
    content = path.read_bytes()
    escaped = mark.encode() if path.suffix == ".csv" else json.dumps(mark)[1:-1].encode()
    assert escaped in content
    bad = b"\\ud83d" if how == "surrogate" and path.suffix == ".jsonl" else b"\xed\xa0\xbd"
    path.write_bytes(content.replace(escaped, bad if how == "surrogate" else b"\xe9"))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("how", ["surrogate", "latin-1"])
def test_a_broken_text_is_named_and_its_row_alone_dropped(tmp_path, suffix, how):
    items, _ = read_items(write(tmp_path / "good.parquet", GOOD["items"]))
    doors = {
        "items": lambda path, skip: read_items(path, skip)[0].ids,
        "events": lambda path, skip: read_events(path, items, skip)[0].user_ids,
    }
    for door, columns in GOOD.items():
        for name in [one for one in columns if one != "position"]:
            row = random.Random(name + suffix).randrange(4)
            path = spoil(tmp_path / f"{door}{suffix}", columns, name, row, how)
            with pytest.raises(BadRowError) as refused:
                doors[door](path, "error")
            message = str(refused.value)
            assert f"{path}: column {name}, row {row}: " in message
            assert suffix != ".jsonl" or f"line {row + 1}: " in message
            assert doors[door](path, "skip") == TEXTS[:row] + TEXTS[row + 1 :]
    if suffix == ".parquet":
        columns = {"user_id": TEXTS, "filter": ["{}"] * 4}
        for name in columns:
            path = spoil(tmp_path / "users.parquet", columns, name, 2, how)
            rows, errors = bodies_of(path)
            assert errors == [f"{name}: expected text in UTF-8, got other bytes"]
            assert [row.user.id for row in rows if row.filter is None or not row.filter] == [
                *TEXTS[:2],
                TEXTS[3],
            ]


@pytest.mark.parametrize("row", ["a,b", "a,b,c,d"])
def test_a_row_of_another_length_is_named_and_dropped_alone(tmp_path, row):
    path = tmp_path / "items.csv"
    path.write_text(f'item_id,title,brand\n1,"x\ny",z\n\n{row}\n2,y,z\n', encoding="utf-8")
    with pytest.raises(BadRowError, match=r"row 1: it has \d fields; expected 3"):
        read_items(path)
    items, report = read_items(path, "skip")
    assert items.ids == ["1", "2"] and report.kept_rows.tolist() == [0, 2]


# Numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_numbers_keep_all_their_digits(tmp_path, suffix, seed):
    drawn = random.Random(seed)
    makers = [
        lambda: str(drawn.randrange(-(10**6), 10**6)),
        lambda: f"{drawn.randrange(1000)}.{drawn.randrange(1, 100):02}",
        lambda: str(drawn.randrange(2**53, 2**63)),
        lambda: str(drawn.randrange(2**63, 2**64)),
        lambda: f"{drawn.randrange(2**53, 2**62)}.0",
        lambda: f"{drawn.randrange(2**53, 2**62)}.5",
    ]
    chosen = drawn.sample(makers, drawn.randrange(1, 4))
    numbers = [drawn.choice(chosen)() for _ in range(20)]
    path = tmp_path / f"items{suffix}"
    if suffix == ".csv":
        lines = ["item_id,amount", *(f"{n},{number}" for n, number in enumerate(numbers))]
    else:
        lines = [f'{{"item_id": {n}, "amount": {number}}}' for n, number in enumerate(numbers)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        items, report = read_items(path)
    except SchemaError as error:  # negative numbers beside those beyond 63 bits
        assert "column amount, line" in str(error) and "64 bits" in str(error)
        return
    kept = [items.attribute(n)["amount"] for n in range(20)]
    for number, value in zip(numbers, kept, strict=True):
        same = Decimal(repr(value) if isinstance(value, float) else value) == Decimal(number)
        assert same, (number, value, report.columns[1])
    if any(isinstance(value, Decimal) for value in kept):
        assert "doubles would round" in report.columns[1].use


# Headers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("odd", ["price, EUR", "a;b;c", "x\ty", "size, w; h"])
def test_the_delimiter_is_told_by_the_rows(tmp_path, delimiter, odd):
    columns = {
        odd: ["1, 5", "2; 5", "3"],
        "item_id": ["0056", "b", "c"],
        "title": ["u, v", "w", "x; y"],
    }
    items, report = read_items(write(tmp_path / "items.csv", columns, delimiter))
    assert items.ids == columns["item_id"] and items.titles == columns["title"]
    assert report.columns[0].name == odd


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_that_is_too_wide_is_refused_by_its_header(tmp_path, suffix):
    wide = {f"c{n}": ["x"] for n in range(MAX_COLUMNS)}
    items, _ = read_items(write(tmp_path / "one.parquet", {"item_id": ["1"]}))
    path = write(
        tmp_path / f"t{suffix}", {"item_id": ["1"], "user_id": ["u"], "position": [1]} | wide
    )
    doors = [read_items, lambda path: read_events(path, items)]
    if suffix != ".csv":
        doors.append(lambda path: read_vectors(path, ["1"]))
    if suffix == ".parquet":
        doors += [lambda path: check(Job(path, tmp_path / "out")), lambda path: scan(path, 5)]
    for door in doors:
        with pytest.raises(SchemaError, match=f"{path}: .*more than {MAX_COLUMNS} columns"):
            door(path)
    if suffix == ".jsonl":
        path.write_text(json.dumps({"item_id": "1", "x": [wide]}))
        with pytest.raises(SchemaError, match=f"line 1: more than {MAX_COLUMNS} columns"):
            read_items(path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_columns_are_named_for_every_file(tmp_path, suffix):
    """A column whose name another one takes is left out, and the report says so."""
    names = {
        "item_id": "sku",
        "title": "name",
        "events.item_id": "thing",
        "user_id": "who",
        "position": "no",
    }
    items_columns = {"sku": ["0056", "b"], "name": ["N", "M"], "title": ["x", "y"]}
    events_columns = {
        "who": ["01", "u"],
        "thing": ["b", "0056"],
        "no": [1, 1],
        "item_id": ["z", "z"],
    }
    items, report = read_items(write(tmp_path / f"i{suffix}", items_columns), columns=names)
    assert items.ids == ["0056", "b"] and items.titles == ["N", "M"]
    assert report.columns[-1].name == "title" and report.columns[-1].type == "left out"
    log, _ = read_events(write(tmp_path / f"e{suffix}", events_columns), items, columns=names)
    assert log.user_ids == ["01", "u"] and log.item_rows.tolist() == [1, 0]
    with pytest.raises(
        SchemaError, match="column nam is missing, which --column title names; did you mean name"
    ):
        read_items(tmp_path / f"i{suffix}", columns={"title": "nam"})
    if suffix == ".parquet":
        rows, errors = bodies_of(tmp_path / "e.parquet", columns={"user_id": "who", "k": "no"})
        assert errors == [] and [(row.user.id, row.k) for row in rows] == [("01", 1), ("u", 1)]
        with pytest.raises(SchemaError, match="column wo is missing, .* did you mean who"):
            check(Job(tmp_path / "e.parquet", tmp_path / "out", columns={"user_id": "wo"}))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"itemid": "x"}, "unknown column 'itemid'; did you mean item_id"),
        ({"items.value": "x"}, "unknown column 'items.value'; did you mean events.value"),
        ({"item_id": "x", "title": "x"}, "column 'x' is named as item_id and as title"),
        ({"vector": "x"}, "unknown column 'vector'"),
        ({"title": ""}, "column title has no name"),
    ],
    ids=str,
)
def test_names_that_cannot_be_are_refused(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        BuildOptions(tmp_path / "i", tmp_path / "e", tmp_path / "o", columns=columns)


@pytest.mark.parametrize("values", [["a=b", "a=c"], ["item_id"], ["=x"], ["item_id="]], ids=str)
def test_flags_that_name_no_column_or_one_twice_are_refused(values):
    with pytest.raises(typer.BadParameter, match="given twice|expected OURS=THEIRS"):
        column_names(values)


NESTED = [[["Kitchen", "Pots"], ["Gifts"]], [["Kitchen"]]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_nested_categories_are_told_how_to_be_written(tmp_path, suffix):
    path = write(tmp_path / f"i{suffix}", {"item_id": ["a", "b"], "categories": NESTED})
    with pytest.raises(SchemaError, match="column categories is list.* as in .*Kitchen > Pots"):
        read_items(path)
