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


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/toy", "/version", "/openapi.json", "/nothing"]
)
def test_head_works_wherever_get_does(server, path):
    key = {"Authorization": f"Bearer {KEY}"}
    got, headed = (server.request(method, path, headers=key) for method in ("GET", "HEAD"))
    assert (headed.status_code, headed.content) == (got.status_code, b"")
    assert headed.headers["content-length"] == str(len(got.content))


def test_head_of_a_route_without_get_is_405(server):
    answer = server.head("/v1/completions", headers={"Authorization": f"Bearer {KEY}"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_head_is_counted_under_its_route(server):
    key = {"Authorization": f"Bearer {KEY}"}
    server.head("/v1/models", headers=key)
    assert 'route="/v1/models"' in server.get("/metrics", headers=key).text


def test_head_of_the_metrics_has_no_body(server):
    answer = server.head("/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/plain")


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


def test_allow_names_head_where_it_is_answered(server):
    headers = {"Authorization": f"Bearer {KEY}"}
    assert server.post("/health/ready", headers=headers).headers["allow"] == "GET, HEAD"
    assert server.post("/version", headers=headers).headers["allow"] == "GET, HEAD"


def test_head_is_not_described(server):
    described = server.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert list(described["paths"]["/health/ready"]) == ["get"]
