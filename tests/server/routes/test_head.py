"""HEAD on what uptime checks ask for: the headers of a GET, without a body."""

import pytest

from tests.support.live_server import live
from tests.support.scripted_text import scripted

KEY = "a-key-of-sixteen"
HEALTH = ("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    served = scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes")
    with live(served, api_keys=(KEY,)) as running:
        yield running


@pytest.mark.parametrize("path", [*HEALTH, "/"])
def test_head_answers_like_get_without_a_body(server, path):
    key = {} if path in HEALTH else {"Authorization": f"Bearer {KEY}"}
    got, headed = (server.request(method, path, headers=key) for method in ("GET", "HEAD"))
    assert (headed.status_code, headed.content) == (200, b"")
    for name in ("content-length", "content-type"):
        assert headed.headers[name] == got.headers[name]
    assert len(got.content) == int(headed.headers["content-length"])


def test_head_is_counted_under_its_route(server):
    key = {"Authorization": f"Bearer {KEY}"}
    server.head("/v1/models", headers=key)
    assert 'route="/v1/models"' in server.get("/metrics", headers=key).text


def test_head_needs_a_key_where_get_does(server):
    assert server.head("/metrics").status_code == server.head("/").status_code == 401


def test_head_says_that_the_server_is_not_ready(server):
    lifecycle = server.app.state.lifecycle
    lifecycle.draining = True
    try:
        answer = server.head("/health/ready")
    finally:
        lifecycle.draining = False
    assert (answer.status_code, answer.content) == (503, b"")
