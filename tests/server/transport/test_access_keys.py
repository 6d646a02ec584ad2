"""Keys are compared as a whole: a key that is nearly right opens nothing."""

import base64

import pytest

from tests.support.live_server import live
from tests.support.scripted_text import scripted

KEY = "sixteen-bytes-are-not-the-whole-key"
ADMIN = "sixteen-bytes-are-not-the-admin-key"
assert len(KEY) == len(ADMIN) and KEY[:22] == ADMIN[:22]
NEAR = {
    "its first 16 bytes": KEY[:16],
    "other bytes after 16": KEY[:16] + "x" * (len(KEY) - 16),
    "another last byte": KEY[:-1] + "Y",
    "another first byte": "S" + KEY[1:],
    "without its last byte": KEY[:-1],
    "with one more byte": KEY + "y",
    "upper case": KEY.upper(),
    "twice": KEY + KEY,
}
CLOSED = (
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/events"),
    ("PUT", "/v1/items"),
    ("DELETE", "/v1/users/u"),
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    toy = scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes")
    with live(toy, api_keys=(KEY,), admin_keys=(ADMIN,)) as client:
        yield client


def status(client, method, path, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    return client.request(method, path, headers=headers).status_code


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"user:{key}".encode()).decode()


@pytest.mark.parametrize("wrong", NEAR, ids=str)
def test_a_key_that_is_nearly_right_is_refused(client, wrong):
    for authorization in (f"Bearer {NEAR[wrong]}", basic(NEAR[wrong])):
        for method, path in CLOSED:
            assert status(client, method, path, authorization) == 401, (method, path)


def test_the_key_itself_is_accepted(client):
    for authorization in (f"Bearer {KEY}", f"bearer {KEY}", basic(KEY)):
        assert status(client, "GET", "/v1/models", authorization) == 200


def test_admin_routes_want_an_admin_key_and_others_an_api_key(client):
    for key in (KEY, ADMIN[:16], ADMIN[:-1], ADMIN + "x"):
        assert status(client, "GET", "/admin/bundle", f"Bearer {key}") == 401
    assert status(client, "GET", "/admin/bundle", f"Bearer {ADMIN}") not in (401, 403)
    assert status(client, "GET", "/v1/models", f"Bearer {ADMIN}") == 401
