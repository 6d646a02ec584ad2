"""A method that does nothing on a path is 405 and names the methods that do something."""

import pytest

from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with live(Service.open(shared_bundle(), f"lmdb:{store}", "cpu")) as running:
        yield running


def store_event(client, user_id):
    item = client.get("/playground/samples").json()["items"][0]
    event = {"user_id": user_id, "item_id": item}
    assert client.post("/v1/events", json={"events": [event]}).json()["accepted"] == 1


def num_events(client, path):
    return len(client.get(path).json()["events"])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/users/ann/history",
        "/v1/users/ann/%68istory",
        "/v1/users/ann/b/history",
        "/v1/users//history",
    ],
)
@pytest.mark.parametrize("method", ["DELETE", "POST", "PUT", "PATCH"])
def test_a_history_can_only_be_read(client, method, path):
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (405, "GET, HEAD")
    assert answer.json() == {
        "error": {
            "message": "wrong method; this route takes GET, HEAD",
            "type": "invalid_request_error",
            "param": None,
            "code": "method_not_allowed",
        }
    }


def test_a_refused_delete_of_a_history_leaves_the_events(client):
    store_event(client, "bob")
    assert client.delete("/v1/users/bob/history").status_code == 405
    assert num_events(client, "/v1/users/bob/history") == 1
    assert client.delete("/v1/users/bob").status_code == 204
    assert num_events(client, "/v1/users/bob/history") == 0


def test_a_slash_that_belongs_to_an_id_is_percent_encoded(client):
    """`x%2Fhistory` is a user; `x/history` is the history of the user `x`."""
    for user_id in ("x", "x/history", "history"):
        store_event(client, user_id)
    assert client.get("/v1/users/x%2Fhistory").status_code == 405
    assert client.delete("/v1/users/x%2Fhistory").status_code == 204
    assert num_events(client, "/v1/users/x%2Fhistory/history") == 0
    assert num_events(client, "/v1/users/x/history") == 1
    assert client.delete("/v1/users/history").status_code == 204
    assert num_events(client, "/v1/users/history/history") == 0


def test_a_history_url_with_a_slash_at_its_end_deletes_nobody(client):
    assert client.delete("/v1/users/ann/history/").status_code == 404
