"""An id that can be written can be read and deleted, whatever its characters are."""

import json
from urllib.parse import quote

import httpx
import pytest

from recserve.client import Client
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import ItemsRequest
from recserve.service import Service, ServiceOptions
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

IDS = [
    "a\nb",
    "a\r\nb\n",
    "\n",
    "a/b//c/",
    "/",
    "..",
    ".",
    "a/../b",
    "?x=1&y#z%41%2F+ ",
    "\0\x7f",
    "x/history\n",
    "a" * 256,
    "界" * 160,
    "é" * 240,
    '"\\\u2028{}[]',
]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    options = ServiceOptions(journal=folder / "items")
    service = Service.open(shared_bundle(), f"lmdb:{folder}/users", "cpu", options)
    with live(service) as running:
        yield running


@pytest.mark.parametrize("user_id", IDS, ids=ascii)
def test_a_user_that_was_stored_is_read_and_deleted(client, user_id):
    item = client.get("/playground/samples").json()["items"][0]
    with Client(str(client.base_url)) as own:
        event = EventInput(user_id=user_id, item_id=item)
        assert own.add_events(EventsRequest(events=[event])).accepted == 1
        assert [e.item_id for e in own.history(user_id).events] == [item]
        own.delete_user(user_id)
        assert own.history(user_id).events == []


@pytest.mark.parametrize("item_id", [*IDS, "😀" * 256], ids=ascii)
def test_an_item_that_was_put_is_read_and_hidden(client, item_id):
    with Client(str(client.base_url)) as own:
        said = own.put_items(ItemsRequest(items=[{"item_id": item_id, "title": "Rose"}]))
        assert (said.inserted, said.rejected) == (1, [])
        assert own.item(item_id).item_id == item_id
        assert own.hide_item(item_id).item_id == item_id
        assert (
            client.get(f"/v1/items/{quote(item_id, safe='').replace('.', '%2E')}").status_code
            == 404
        )


def test_a_lone_surrogate_is_refused(client):
    body = b'{"events": [{"user_id": "\\ud800", "item_id": "x"}]}'
    said = httpx.post(f"{client.base_url}/v1/events", content=body)
    assert said.status_code == 400 or json.loads(said.content)["accepted"] == 0


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("raw", ["%FF", "m%FCller", "%C3", "a%ED%A0%80b", "%C3%BC%E4"])
@pytest.mark.parametrize("path", ["/v1/users/{}", "/v1/items/{}"])
def test_an_address_that_is_not_utf8_is_refused(client, method, raw, path):
    """Another user's data must not be deleted, nor a deletion confirmed that did nothing."""
    path += "/history" if path.startswith("/v1/users") and method == "GET" else ""
    said = client.request(method, path.format(raw))
    assert said.status_code == 422
    error = said.json()["error"]
    assert error["param"] in ("user_id", "item_id")
    assert "expected UTF-8 in the address, got" in error["message"]


@pytest.mark.parametrize("query", ["query=%FF", "query=m%FCller", "ids=a,%FF", "%FC=1"])
def test_a_query_that_is_not_utf8_is_refused(client, query):
    said = client.get(f"/v1/items?{query}")
    assert said.status_code == 422
    assert "expected UTF-8 in the address, got" in said.json()["error"]["message"]
