"""Reading items: ids are distinct, optional columns are optional, the rest are attributes."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.features.tables.items import ItemTable, item_table, read_items
from recserve.features.tables.parquet import BadRowError, SchemaError
from tests.support.input_parts import KINDS, SEPARATOR, write_parts, write_table


def written(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path / "items.parquet")
    return path / "items.parquet"


def test_reads_all_columns(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        item_id=["b", "a"],
        title=["Pan", None],
        categories=[["Kitchen > Pans", None], None],
        price=[1.5, 2.5],
    )
    items, report = read_items(path)
    assert items.ids == ["b", "a"] and items.titles == ["Pan", ""]
    assert items.categories == [["Kitchen > Pans"], []]
    assert items.attribute(1) == {"price": 2.5}
    assert report.lines() == []


def test_integer_ids_are_their_digits(tmp_path: Path) -> None:
    items, _ = read_items(written(tmp_path, item_id=pa.array([3, -20], pa.int64())))
    assert items.ids == ["3", "-20"]


def test_only_ids_are_needed(tmp_path: Path) -> None:
    items, _ = read_items(written(tmp_path, item_id=pa.array(["x", "y"]).dictionary_encode()))
    assert (items.ids, items.titles, items.categories) == (["x", "y"], ["", ""], [[], []])
    assert items.attribute(0) == {}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": ["a"]}, "column item_id .* is missing; the file has id"),
        ({"item_id": [0.5]}, "column item_id is double; expected string or integer"),
        ({"item_id": ["a"], "title": [1]}, "column title is int64; expected string"),
        ({"item_id": ["a"], "categories": ["Pan"]}, "column categories is string; expected list"),
        ({"item_id": pa.array([], pa.string())}, "no rows"),
    ],
    ids=["missing", "item-id-type", "title-type", "categories-type", "empty"],
)
def test_schema_is_refused(tmp_path: Path, columns: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=f"items.parquet: .*{message}"):
        read_items(written(tmp_path, **columns), "skip")


@pytest.mark.parametrize(
    ("ids", "reason", "kept"),
    [
        (["a", None, "b"], "null item_id", ["a", "b"]),
        (["a", "", "b"], "null item_id", ["a", "b"]),
        (["a", "a", "b"], "duplicate item_id", ["a", "b"]),
    ],
    ids=str,
)
def test_bad_row_is_named_or_dropped(
    tmp_path: Path, ids: list[str], reason: str, kept: list[str]
) -> None:
    path = written(tmp_path, item_id=ids, price=[1, 2, 3])
    with pytest.raises(BadRowError, match=f"items.parquet: column item_id, row 1: .*{reason}"):
        read_items(path)
    items, report = read_items(path, "skip")
    assert items.ids == kept and items.attributes.column("price").to_pylist() == [1, 3]
    assert report.dropped == {reason: 1} and report.kept_rows.tolist() == [0, 2]


def test_only_the_first_bad_rows_are_spelled_out(tmp_path: Path) -> None:
    path = written(tmp_path, item_id=["a"] * 40)
    _, report = read_items(path, "skip")
    assert report.dropped == {"duplicate item_id": 39} and len(report.examples) == 10


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="no usable rows"):
        read_items(written(tmp_path, item_id=pa.array([None], pa.string())), "skip")


def test_round_trip_through_arrow(tmp_path: Path) -> None:
    path = written(tmp_path, item_id=["a"], title=["T"], categories=[["x > y"]], brand=["q"])
    items, _ = read_items(path)
    assert item_table(items.to_arrow()) == items


def test_table_refuses_unequal_columns() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        ItemTable(["a"], [], [[]], pa.table({}))


@pytest.mark.parametrize("seed", range(24))
def test_a_folder_of_parts_is_one_file(tmp_path: Path, seed: int) -> None:
    """Parts of each kind, with drawn values, types, faults and sub-folders."""
    draw, kind = random.Random(seed), KINDS[seed % 3]
    rows = draw.choice([1, 40])
    columns: dict[str, list[Any]] = {
        "item_id": [draw.choice([f"i{n}", f"i{n}", "i0", None, "x" * 300]) for n in range(rows)],
        "title": [draw.choice([f"title {n}", None]) for n in range(rows)],
        "categories": [draw.choice([None, ["A"], ["A > B", "C"]]) for n in range(rows)],
        "price": [draw.choice([None, n, n + 0.5 * (seed % 2)]) for n in range(rows)],
        "expires_at": [draw.choice([None, 1_800_000_000 + n]) for n in range(rows)],
    }
    columns["item_id"][0] = "first"
    table = pa.table({name: columns[name] for name in draw.sample(list(columns), 5)})
    whole, folder = tmp_path / f"whole.{kind}", tmp_path / "items"
    write_table(whole, table)
    write_parts(folder, kind, table, draw)
    split = {"categories": SEPARATOR} if kind == "csv" else {}
    (one, first), (two, second) = (read_items(path, "skip", split) for path in (whole, folder))
    assert one.to_arrow().equals(two.to_arrow())
    assert (first.dropped, first.notes, first.num_rows) == (
        second.dropped, second.notes, second.num_rows
    )  # fmt: skip
    assert first.kept_rows.tolist() == second.kept_rows.tolist()
    assert first.columns == tuple(c for c in second.columns if c.type != "name of folders")
    assert all(f"{folder}/" in example for example in second.examples)
    if second.dropped:
        with pytest.raises(BadRowError, match=rf"items/[\w=/]*part-\d\.{kind}: "):
            read_items(folder, "error", split)
