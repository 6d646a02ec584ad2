"""Filters over HTTP compare exactly: built items, items that were put, and after a restart."""

import json
import random
from decimal import Decimal

import pyarrow.parquet as pq
import pytest

from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.schemas.numbers import ENCODER
from recserve.service import Service, ServiceOptions
from tests.support.attribute_filters import (
    ID,
    TYPES,
    arrow_array,
    draw_filter,
    draw_rows,
    fulfils,
)
from tests.support.live_server import live
from tests.support.tiny_bundle import built, with_models

NUM_ITEMS = 500
STORED = {name: kind for name, kind in TYPES.items() if name != "round"}  # Parquet has no such type


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Folder of a bundle whose items have every type of column, ids and drawn values."""
    folder = tmp_path_factory.mktemp("columns")
    files = write_synthetic(folder / "data", SyntheticOptions(NUM_ITEMS, 20, 8, seed=3))
    table = pq.read_table(files.items).select(["item_id", "title", "categories"])
    rows = draw_rows(random.Random(1), STORED, table.num_rows)
    for n, row in enumerate(rows):
        row["int64"] = ID + n
    for name, kind in STORED.items():
        table = table.append_column(name, arrow_array([row[name] for row in rows], kind))
    pq.write_table(table, files.items, store_schema=True)
    built(files, folder / "bundle")
    with_models(folder / "bundle", ranker=True)
    return folder, dict(zip(table.column("item_id").to_pylist(), rows, strict=True))


def opened(folder):
    options = ServiceOptions(journal=folder / "items")
    return Service.open(folder / "bundle", f"lmdb:{folder}/store", "cpu", options)


def send(client, method, path, body):
    return client.request(method, path, content=ENCODER.encode(body))


def ids_of(client, tree):
    body = {"history": ["item000001"], "k": 1000, "beam_width": 1000, "exclude": {"seen": False}}
    answer = send(client, "POST", "/v1/recommend", {**body, "filter": tree})
    assert answer.status_code == 200, (tree, answer.text)
    assert answer.json()["exact"]
    return sorted(item["item_id"] for item in answer.json()["items"])


def assert_equals_the_loop(client, rows, seed, count):
    draw = random.Random(seed)
    for _ in range(count):
        tree = draw_filter(draw, STORED, list(rows.values()))
        wanted = sorted(item for item, row in rows.items() if fulfils(tree, row, STORED))
        assert ids_of(client, tree) == wanted, tree
    for item in draw.sample(sorted(rows), 5):
        given = json.loads(client.get(f"/v1/items/{item}").text, parse_float=Decimal)["attributes"]
        for name, value in rows[item].items():
            other = float(given[name]) if isinstance(value, float) else given[name]
            assert other == value, (item, name)


def test_every_filter_equals_a_plain_loop(drawn):
    """Of the bundle, after changes, and after a restart that reads the journal."""
    folder, rows = drawn
    draw = random.Random(2)
    with live(opened(folder)) as client:
        assert_equals_the_loop(client, rows, 3, 12)
        some, new = draw.sample(sorted(rows), 30), [f"new{n}" for n in range(10)]
        values = draw_rows(draw, STORED, len(some + new))
        puts = [{"item_id": i, "attributes": v} for i, v in zip(some + new, values, strict=True)]
        answer = send(client, "PUT", "/v1/items", {"items": puts})
        assert answer.status_code == 200 and answer.json()["rejected"] == [], answer.text
        rows = {**rows, **dict(zip(some + new, values, strict=True))}
        assert_equals_the_loop(client, rows, 4, 12)
    with live(opened(folder)) as client:
        assert_equals_the_loop(client, rows, 5, 8)


def test_numbers_of_a_body_do_not_pass_through_a_double(drawn, tmp_path):
    folder, _ = drawn
    options = ServiceOptions(journal=tmp_path / "items")
    with live(Service.open(folder / "bundle", f"lmdb:{tmp_path}/s", "cpu", options)) as client:

        def slate(condition, **fields):
            raw = json.dumps({"history": ["item000001"], "k": 100, **fields})[:-1]
            raw += f', "exclude": {{"seen": false}}, "filter": {condition}}}'
            answer = client.post("/v1/recommend", content=raw)
            return [item["item_id"] for item in answer.json()["items"]]

        same = slate(f'{{"eq": ["int64", {ID + 5}]}}')
        assert len(same) == 1
        assert slate(f'{{"eq": ["int64", {ID + 5}.0]}}') == same
        assert slate(f'{{"eq": ["int64", {ID + 5}.0]}}', k=100.0) == same
        assert slate(f'{{"range": ["int64", {ID + 4}.5, {ID + 5}.5]}}') == same
        assert slate(f'{{"eq": ["int64", {(ID + 5) / 10:.1f}E1]}}') != same
        assert slate(f'{{"eq": ["int64", {ID + 5}.1]}}') == []
        raw = (
            '{"items": [{"item_id": "item000003", "int64": %d.0, "exact": 12345678901234567.8901}]}'
        )
        answer = client.put("/v1/items", content=raw % (ID + 900))
        assert answer.json()["updated"] == 1
        assert slate(f'{{"eq": ["int64", {ID + 900}]}}') == ["item000003"]
        assert slate('{"eq": ["exact", 12345678901234567.8901]}') == ["item000003"]
        assert slate('{"eq": ["exact", "12345678901234567.8901"]}') == ["item000003"]
        assert slate('{"eq": ["exact", 12345678901234567.8902]}') == []
        assert '"exact":12345678901234567.8901' in client.get("/v1/items/item000003").text
        for number in ("1e400", "-1e999999", "1e-999999999"):
            assert slate(f'{{"eq": ["int64", {number}]}}') == []
        vast = client.post(
            "/v1/recommend",
            content='{"history": [], "filter": {"eq": ["int64", 1e99999999999999999999]}}',
        )
        assert vast.status_code == 422 and "out of range" in vast.json()["error"]["message"]
        bad = '{"items": [{"item_id": "item000003", "int64": 1e99999999999999999999}]}'
        answer = client.put("/v1/items", content=bad)
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == "items[0].int64"
