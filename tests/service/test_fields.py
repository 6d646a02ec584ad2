"""Answers that show columns of the catalogue: `fields` of recommend and rank."""

from __future__ import annotations

import datetime
import random
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve import InvalidRequest
from recserve.batch import Defaults, SlateRecipe
from recserve.batch.recipe import WrongOption, from_json, to_json
from recserve.features.tables.attribute_values import record_value, take_values
from recserve.schemas.items import MAX_FIELD_VALUES, MAX_FIELDS
from recserve.service.fields import MAX_NAMED, unknown_column
from tests.support.live_catalogues import opened, put
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

TIMES = ["available_from", "expires_at"]
KNOWN = ["title", "categories", *TIMES, "brand", "price"]
NEW = {"item_id": "new-1", "title": "Rose kettle", "categories": ["Tea > Pots"], "price": 7.5}
NEW |= {"available_from": "2026-01-01T00:00:00.250000Z", "expires_at": "2200-01-01T00:00:00Z"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service with a new item, a changed one and one whose values were removed."""
    with opened(tmp_path_factory.mktemp("fields")) as service:
        changed, bare = service.samples(1, 2)["items"]
        items = [NEW, {"item_id": changed, "brand": "Other"}]
        items.append({"item_id": bare, "title": "", "categories": [], "price": None})
        assert put(service, *items).rejected == []
        yield service


@pytest.fixture(scope="module")
def client(service):
    with live(service) as running:
        yield running


@pytest.fixture(scope="module")
def user(service):
    return service.samples(1, 1)["users"][0]


def stored(service, item_id, names):
    """The columns of an item as GET /v1/items/{id} has them."""
    item = service.item(item_id)
    values = {"title": item.title, "categories": item.categories, **item.attributes}
    values |= {name: getattr(item, name) or None for name in TIMES}
    return {name: values[name] for name in names}


def test_a_slate_shows_the_columns_of_each_item(service, user):
    """Items of the model and popular ones, of the bundle, new and changed."""
    draw = random.Random(1)
    for strategy in service.engine.selectable:
        names = draw.sample(KNOWN, draw.randint(1, len(KNOWN)))
        body = {"history": [NEW["item_id"]], "k": 100, "beam_width": 100, "strategy": strategy}
        body["exclude"] = {"seen": False}
        answer = service.recommend({**body, "fields": names})
        plain = service.recommend(body)
        assert [i.item_id for i in answer.items] == [i.item_id for i in plain.items]
        for item in answer.items:
            assert item.fields == stored(service, item.item_id, names), (strategy, item)
            assert list(item.fields) == names
        assert {bool(one.fields) for one in plain.items} == {False}
    changed, bare = service.samples(1, 2)["items"]
    names = {"in": ["item_id", ["new-1", changed, bare]]}
    cold = service.recommend({"user": "nobody", "k": 3, "filter": names, "fields": KNOWN})
    shown = {item.item_id: item.fields for item in cold.items}
    assert shown == {name: stored(service, name, KNOWN) for name in ("new-1", changed, bare)}
    assert shown["new-1"] == {name: NEW.get(name) for name in KNOWN}
    assert shown[changed]["brand"] == "Other"
    assert {"title": None, "categories": [], "price": None}.items() <= shown[bare].items()


def test_a_ranking_shows_the_columns_of_each_candidate(service, user):
    items = service.samples(1, 30)["items"]
    candidates = ["new-1", *items, "unknown", items[3]]
    for scorer in ("ranker", "likelihood"):
        body = {"user": user, "candidates": candidates, "scorer": scorer}
        answer = service.rank({**body, "fields": ["price", "title"]})
        assert [(i.item_id, i.score) for i in answer.items] == [
            (i.item_id, i.score) for i in service.rank(body).items
        ]
        assert answer.missing_item_ids == ["unknown"] and len(answer.items) == 31
        for item in answer.items:
            assert item.fields == stored(service, item.item_id, ["price", "title"])
    nothing = service.rank({"user": user, "candidates": ["unknown"], "fields": KNOWN})
    assert nothing.items == []


def wrong_fields():
    """Lists of fields that the catalogue cannot show, with the place and a word of the message."""
    return (
        (["title", "prise"], "fields[1]", "expires_at, brand, price; got 'prise'; did you"),
        (["expires"], "fields[0]", "did you mean expires_at?"),
        (["added_at"], "fields[0]", "title, categories, available_from, expires_at"),
        (["item_id"], "fields[0]", "the catalogue has title, categories"),
        (["semantic_id"], "fields[0]", "got 'semantic_id'"),
        (["x" * 200], "fields[0]", "got '" + "x" * 60 + "'"),
        (["price", "title", "price"], "fields[2]", "once, got 'price' again"),
        ([7], "fields[0]", "expected str"),
    )


@pytest.mark.parametrize("fields, param, words", wrong_fields())
def test_a_wrong_field_is_named(service, client, user, fields, param, words):
    candidates = [{"item_id": "new-1"}]
    ranking = {"user": {"id": user}, "candidates": candidates, "fields": fields}
    recommend = {"user": {"id": user}, "fields": fields}
    for path, body in (("/v1/recommend", recommend), ("/v1/rank", ranking)):
        answer = client.post(path, json=body)
        assert answer.status_code == 422, answer.text
        error = answer.json()["error"]
        assert error["param"] == param and words in error["message"], error
    with pytest.raises(InvalidRequest) as refused:
        service.recommend(recommend)
    assert refused.value.param == param


def test_one_wrong_ranking_of_a_batch_fails_alone(client, user):
    one = {"user": {"id": user}, "candidates": [{"item_id": "new-1"}]}
    body = {"requests": [{**one, "fields": [name]} for name in ("price", "prise")]}
    right, wrong = client.post("/v1/rank:batch", json=body).json()["results"]
    assert right["answer"]["items"][0]["fields"] == {"price": 7.5}
    assert wrong["error"]["param"] == "fields[0]"


def test_the_values_of_a_batch_are_bounded(client, user):
    """Each ranking is allowed alone; one more value than the bound is refused."""
    candidates = [{"item_id": str(number)} for number in range(MAX_FIELD_VALUES // 128 + 1)]
    one = {"history": [], "candidates": candidates, "fields": KNOWN[:4]}
    answer = client.post("/v1/rank:batch", json={"requests": [one] * 32})
    assert answer.status_code == 422 and answer.json()["error"]["param"] == "fields"
    assert (
        f"at most {MAX_FIELD_VALUES} items times fields, got" in answer.json()["error"]["message"]
    )
    one["candidates"] = candidates[:-1]
    assert client.post("/v1/rank:batch", json={"requests": [one] * 32}).status_code == 200


def tensor(name, shape, data):
    return {"name": name, "shape": shape, "datatype": "BYTES", "data": data}


def test_outputs_of_the_inference_protocol_show_columns(client, service, user):
    """Texts as they are, other values as JSON, nothing for padding and unknown items."""
    wanted = [{"name": n} for n in ("fields.title", "fields.price", "fields.categories", "rank")]
    item = service.samples(1, 3)["items"][2]
    candidates = tensor("candidates", [1, 3], ["new-1", "unknown", item])
    body = {"inputs": [tensor("user_id", [1], [user]), candidates], "outputs": wanted}
    answer = client.post("/v2/models/rank/infer", json=body).json()
    outputs = {one["name"]: (one["datatype"], one["data"]) for one in answer["outputs"]}
    other = service.item(item)
    assert outputs["fields.title"] == ("BYTES", ["Rose kettle", "", other.title])
    assert outputs["fields.price"] == ("BYTES", ["7.5", "", str(other.attributes["price"])])
    assert outputs["fields.categories"][1][:2] == ['["Tea > Pots"]', ""]
    body = {"inputs": [tensor("user_id", [2], [user, "nobody"])], "outputs": wanted[:1]}
    (titles,) = client.post("/v2/models/recommend/infer", json=body).json()["outputs"]
    slate = client.post("/v1/recommend", json={"user": {"id": user}, "fields": ["title"]}).json()
    assert titles["data"][:10] == [one["fields"]["title"] or "" for one in slate["items"]]
    body["outputs"] = [{"name": "fields.prise"}]
    answer = client.post("/v2/models/recommend/infer", json=body)
    assert answer.status_code == 422 and "did you mean price?" in answer.json()["error"]
    body["outputs"] = [{"name": "fields.title", "parameters": {"binary_data": True}}]
    answer = client.post("/v2/models/recommend/infer", json=body)
    assert slate["items"][0]["fields"]["title"].encode() in answer.content


def test_a_batch_job_writes_the_columns(tmp_path, user):
    store = f"lmdb:{tmp_path}/users"
    recipe = SlateRecipe(str(shared_bundle()), Defaults(k=4, fields=("price", "title")), store)
    assert from_json(to_json(recipe)) == recipe
    with recipe.open() as task:
        answers = task(pa.table({"user_id": [user, "nobody"]}), 0).answers
        nothing = task(pa.table({"user_id": pa.array([], pa.string())}), 0).answers
    catalog = pq.read_table(shared_bundle() / "catalog.parquet", columns=["price", "title"])
    ids = pq.read_table(shared_bundle() / "catalog.parquet", columns=["item_id"])
    rows = {item_id: row for row, item_id in enumerate(ids.column(0).to_pylist())}
    assert answers.num_rows == 8 and nothing.schema.equals(answers.schema)
    assert answers.schema.field("fields").type == pa.struct(list(catalog.schema))
    for line in answers.to_pylist():
        assert line["fields"] == catalog.slice(rows[line["item_id"]], 1).to_pylist()[0]
    wrong = SlateRecipe(str(shared_bundle()), Defaults(fields=("prise",)), store)
    with pytest.raises(WrongOption, match="did you mean price"), wrong.open():
        pass
    with pytest.raises(ValueError, match=f"expected 0..{MAX_FIELDS}"):
        Defaults(fields=("title",) * (MAX_FIELDS + 1))


def columns():
    """A column of each kind of type, without its nulls."""
    day, moment = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5)
    pairs = [
        (pa.string(), ["", "ä", "x" * 99]),
        (pa.dictionary(pa.int32(), pa.string()), ["red", "blue"]),
        (pa.list_(pa.string()), [[], ["a", "b"]]),
        (pa.float32(), [0.1, float("inf"), -3.0]),
        (pa.int64(), [2**62, -1]),
        (pa.bool_(), [True, False]),
        (pa.decimal128(9, 2), [Decimal("1.50"), Decimal("-7.00")]),
        (pa.date32(), [day]),
        (pa.timestamp("ms"), [moment]),
        (pa.timestamp("us", "Europe/Paris"), [moment]),
        (pa.time32("s"), [datetime.time(1, 2, 3)]),
        (pa.struct([("a", pa.int8())]), [{"a": 1}]),
    ]
    return [pytest.param(kind, values, id=str(kind)) for kind, values in pairs]


@pytest.mark.parametrize("kind, values", columns())
def test_values_of_many_rows_equal_those_of_one(kind, values):
    """Rows in any order, more than once, of chunks of any length, empty ones too."""
    draw = np.random.default_rng(3)
    for lengths in ([7], [0, 1, 0, 3, 5, 0], [1] * 9):
        chunks = [
            pa.array([values[i] if i < len(values) else None for i in places.tolist()], kind)
            for places in (draw.integers(0, len(values) + 1, length) for length in lengths)
        ]
        column = pa.chunked_array(chunks, kind)
        for size in (0, 1, 20):
            rows = draw.integers(0, len(column), size)
            expected = [record_value(column[row]) for row in rows.tolist()]
            assert take_values(column, rows) == expected


def test_a_message_lists_a_bounded_number_of_columns():
    known = [f"c{number:03}" for number in range(MAX_NAMED + 60)]
    message = unknown_column("c0999", known)
    assert message.count(", ") == MAX_NAMED - 1 and " and 60 more; got 'c0999'" in message
