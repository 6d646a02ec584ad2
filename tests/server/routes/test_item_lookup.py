"""GET /v1/items?ids=: several items by id, over HTTP, in Python and with both clients."""

from __future__ import annotations

import asyncio
import random

import pytest

from recserve import InvalidRequest
from recserve.client import AsyncClient, Client
from recserve.schemas.browse import MAX_LISTED, ItemsQuery, join_texts, split_texts
from tests.support.live_catalogues import opened, put
from tests.support.live_server import live

# Ids with characters that mean something in a list, in a URL or in a path.
ODD = ["7", "a,b", "a\\", "\\", ",", "\\,", "a\\\\b", " a", "ä/?&=+%2C", "日本", "a\nb"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("lookup")) as service:
        items = [{"item_id": one, "title": f"Title of {one}", "price": 2} for one in ODD]
        assert put(service, *items).rejected == []
        yield service


@pytest.fixture(scope="module")
def client(service):
    with live(service) as running:
        yield running


@pytest.fixture(scope="module")
def known(service):
    return [*service.samples(1, 60)["items"], *ODD]


def test_items_come_in_the_order_of_the_ids(client, known):
    """Also one that occurs twice. Each is what GET /v1/items/{id} says."""
    wanted = known[5:0:-1] + [known[3]]
    answer = client.get(f"/v1/items?ids={','.join(wanted)}").json()
    assert [item["item_id"] for item in answer["items"]] == wanted
    assert answer["missing_item_ids"] == [] and answer["next"] is None
    for item in answer["items"]:
        alone = client.get(f"/v1/items/{item['item_id']}").json()
        assert {**item, "catalog_version": answer["catalog_version"]} == alone
    page = client.get("/v1/items").json()
    assert "missing_item_ids" not in page and "attributes" not in page["items"][0]
    assert answer["num_items"] == page["num_items"]


def test_unknown_and_hidden_items_are_named_and_the_others_come(client, service, known):
    service.put_items({"items": [{"item_id": "gone", "title": "Gone"}]})
    service.hide_item("gone")
    ids = ["x", known[0], "gone", "y", "x", known[1]]
    answer = client.get("/v1/items", params={"ids": ",".join(ids)})
    assert answer.status_code == 200
    assert [item["item_id"] for item in answer.json()["items"]] == known[:2]
    assert answer.json()["missing_item_ids"] == ["x", "gone", "y"]
    assert client.get("/v1/items?ids=x").json()["items"] == []


def test_clients_and_python_look_up_any_ids(client, service, known):
    draw = random.Random(2)
    url = str(client.base_url)

    async def look_up(query):
        async with AsyncClient(url) as asynchronous:
            return await asynchronous.items(query)

    with Client(url) as synchronous:
        for count in (1, 2, 7, MAX_LISTED):
            ids = draw.choices([*known, "unknown"], k=count)
            query = ItemsQuery(ids=ids)
            page = synchronous.items(query)
            assert [item.item_id for item in page.items] == [i for i in ids if i != "unknown"]
            assert page == asyncio.run(look_up(query)) == service.items({"ids": ids})
        assert [item.item_id for item in synchronous.items(ItemsQuery(ids=[7])).items] == ["7"]
        assert len(synchronous.items(ItemsQuery(limit=3)).items) == 3
    assert [item.item_id for item in service.items({"ids": [7]}).items] == ["7"]
    assert len(service.items({}).items) == 20


def test_every_list_of_texts_is_divided_as_it_was_joined():
    draw = random.Random(5)
    for _ in range(2000):
        texts = ["".join(draw.choices(",\\ab ä", k=draw.randint(0, 5))) for _ in range(4)]
        texts = texts[: draw.randint(1, 4)]
        assert split_texts(join_texts(texts)) == texts
    assert split_texts("C:\\dir,b\\") == ["C:\\dir", "b\\"]  # a backslash that escapes nothing


@pytest.mark.parametrize(
    "query, param, words",
    [
        ("ids=", "ids[0]", 'length >= 1, got ""'),
        ("ids=a,,b", "ids[1]", "length >= 1"),
        ("ids=a,b,", "ids[2]", "length >= 1"),
        (f"ids=a,{'x' * 257}", "ids[1]", "length <= 256"),
        (f"ids={','.join('a' * (MAX_LISTED + 1))}", "ids", f"length <= {MAX_LISTED}"),
        ("ids=a&ids=b", "ids", "one value with commas between its parts, got several"),
        ("ids=a&limit=20", "ids", "expected no other parameter with it, got limit"),
        ("ids=a&query=b", "ids", "expected no other parameter with it, got query"),
        ("ids=a&after=3", "ids", "expected no other parameter with it, got after"),
        ("id=a", "id", "did you mean ids?"),
    ],
)
def test_a_wrong_lookup_is_named(client, query, param, words):
    answer = client.get(f"/v1/items?{query}")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_wrong_ids_are_refused_in_python(service):
    for query, param in (({"ids": []}, "ids"), ({"ids": [1.5]}, "ids[0]"), ({"ids": "a"}, "ids")):
        with pytest.raises(InvalidRequest) as refused:
            service.items(query)
        assert refused.value.param == param
