"""GET /v1/items and /v1/users: search, pages, bounds."""

import pytest

from recserve.schemas.browse import MAX_LISTED
from recserve.service import Service, ServiceOptions, live_catalog
from tests.support.live_server import live
from tests.support.tiny_bundle import NUM_ITEMS, NUM_USERS, shared_bundle


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browse")
    options = ServiceOptions(journal=folder / "journal")
    with live(Service.open(shared_bundle(), f"lmdb:{folder}/store", "cpu", options)) as running:
        yield running


def pages(client, path, **query):
    """All pages of a listing."""
    found = [client.get(path, params=query).json()]
    while found[-1]["next"] is not None:
        after = {"after": found[-1]["next"]}
        found.append(client.get(path, params=query | after).json())
    return found


def ids(found):
    return [item["item_id"] for page in found for item in page["items"]]


def test_pages_hold_every_item_once_the_most_popular_first(client):
    found = pages(client, "/v1/items", limit=MAX_LISTED)
    items = [item for page in found for item in page["items"]]
    assert len(set(ids(found))) == len(items) == found[0]["num_items"] == NUM_ITEMS
    popularity = [item["popularity"] for item in items]
    assert popularity == sorted(popularity, reverse=True)
    detail = client.get(f"/v1/items/{items[3]['item_id']}").json()
    assert items[3].items() <= detail.items()


def test_a_search_finds_titles_and_ids_in_upper_or_lower_case(client):
    every = [item for page in pages(client, "/v1/items", limit=100) for item in page["items"]]
    word = every[0]["title"].split()[0]
    expected = [i["item_id"] for i in every if word.casefold() in i["title"].casefold()]
    assert len(expected) > 1
    assert ids(pages(client, "/v1/items", query=word.upper(), limit=7)) == expected
    wanted = every[-1]["item_id"]
    assert ids(pages(client, "/v1/items", query=wanted)) == [wanted]
    assert ids(pages(client, "/v1/items", query="no such words")) == []


def test_a_call_looks_at_a_bounded_number_of_items(client, monkeypatch):
    every = ids(pages(client, "/v1/items", limit=100))
    monkeypatch.setattr(live_catalog, "MAX_SCANNED", 90)
    first = client.get("/v1/items", params={"query": every[450], "after": 0}).json()
    assert [item["item_id"] for item in first["items"]] == [every[450]]
    short = client.get("/v1/items", params={"query": every[450][-5:]}).json()
    assert short["next"] == 90
    assert ids(pages(client, "/v1/items", limit=100)) == every


def test_changed_and_hidden_items_are_listed_as_they_are(client):
    first, second = ids(pages(client, "/v1/items"))[:2]
    put = client.put("/v1/items", json={"items": [{"item_id": first, "title": "Brand-new Name"}]})
    assert put.json()["updated"] == 1
    assert ids(pages(client, "/v1/items", query="brand-NEW")) == [first]
    client.delete(f"/v1/items/{second}")
    found = pages(client, "/v1/items", limit=100)
    assert second not in ids(found) and found[0]["num_items"] == NUM_ITEMS - 1


def test_pages_hold_every_user_once(client):
    found = pages(client, "/v1/users", limit=7)
    users = [user for page in found for user in page["users"]]
    assert len(users) == len(set(users)) == NUM_USERS and users == sorted(users)
    some = [
        user for page in pages(client, "/v1/users", prefix=users[5][:-1]) for user in page["users"]
    ]
    assert some == [user for user in users if user.startswith(users[5][:-1])] and users[5] in some
    assert pages(client, "/v1/users", prefix="x" * 200) == [{"users": [], "next": None}]
