"""Keys are compared as a whole: a key that is nearly right opens nothing."""

import base64
import re

import pytest

from recserve.schemas.api import OPERATIONS
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
# The routes that need no key, as docs/reference/http.md promises.
OPEN = (
    *("/health", "/health/live", "/health/ready", "/ping"),
    *("/v2/health/live", "/v2/health/ready"),
)
ROUTES = [
    (row.method, re.sub(r"\{[^}]*\}", "x", path))
    for row in OPERATIONS.values()
    for path in (row.path, *row.aliases)
    if path not in OPEN
]
CLOSED = [route for route in ROUTES if not route[1].startswith("/admin/")]


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


def test_without_a_key_only_probes_are_answered(client):
    """On every route of the table; those of admins want another key than the others."""
    assert len(ROUTES) > 40
    for method, path in ROUTES:
        wrong = (None, "Bearer", KEY, f"Digest {KEY}", *[f"Bearer {KEY}"] * (path[:7] == "/admin/"))
        for authorization in wrong:
            assert status(client, method, path, authorization) == 401, (method, path)


def test_probes_need_no_key(client):
    for path in OPEN:
        assert status(client, "GET", path, None) == 200


def test_admin_routes_want_an_admin_key_and_others_an_api_key(client):
    for key in (KEY, ADMIN[:16], ADMIN[:-1], ADMIN + "x"):
        assert status(client, "GET", "/admin/bundle", f"Bearer {key}") == 401
    assert status(client, "GET", "/admin/bundle", f"Bearer {ADMIN}") not in (401, 403)
    assert status(client, "GET", "/v1/models", f"Bearer {ADMIN}") == 401
