"""A server without keys serves the names of its own machine only: a web page cannot borrow it."""

import pytest

from tests.support.live_server import live
from tests.support.scripted_text import scripted

KEY = "a-key-of-sixteen"
BODY = {"prompt": "x", "max_tokens": 1}


@pytest.fixture
def toy(tmp_path):
    return scripted(tmp_path, lambda prompt, seed: "yes")


def code_of(answer):
    return answer.status_code, answer.json()["error"]["code"] if answer.is_error else None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.7:{port}", 403),
        ("evil@localhost", 200),
        ("", 403),
        ("[::1", 403),
        ("localhost", 200),
        ("LOCALHOST.:{port}", 200),
        ("app.localhost:1", 200),
        ("127.0.0.1:{port}", 200),
        ("127.1.2.3", 200),
        ("[::1]:{port}", 200),
        ("models.internal:9", 200),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_host_must_be_ours(toy, host, status, method):
    with live(toy, allowed_hosts=("Models.Internal",)) as client:
        path = "/v1/models" if method == "GET" else "/v1/completions"
        headers = {"Host": host.format(port=client.base_url.port)}
        answer = client.request(
            method, path, headers=headers, json=BODY if path[4] == "c" else None
        )
        assert code_of(answer) == (status, "cross_site" if status == 403 else None)
        # Orchestrators probe by any name.
        assert client.get("/health/ready", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("http://127.0.0.1:1", 403),
        ("http://localhost:{port}", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://127.0.0.1:{port}", 200),
        ("https://models.internal", 200),
    ],
)
def test_the_origin_must_be_the_host(toy, origin, status):
    with live(toy, allowed_hosts=("models.internal",)) as client:
        headers = {"Origin": origin.format(port=client.base_url.port), "Content-Type": "text/plain"}
        answer = client.post("/v1/completions", headers=headers, json=BODY)
        assert code_of(answer) == (status, "cross_site" if status == 403 else None)


@pytest.mark.parametrize("settings", [{"api_keys": (KEY,)}, {"insecure": True}])
def test_with_keys_any_name_is_served(toy, settings):
    with live(toy, **settings) as client:
        headers = {"Host": "shop.example", "Origin": "https://www.example"}
        headers |= {"Authorization": f"Bearer {KEY}"}
        assert client.post("/v1/completions", headers=headers, json=BODY).status_code == 200
