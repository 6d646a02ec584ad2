"""Web pages of other sites cannot borrow a server, nor a key that the browser remembers."""

import base64

import pytest
from aiohttp import web

from tests.support.chromium import browser
from tests.support.http_server import http_server
from tests.support.live_server import live
from tests.support.raw_http import connect, one_of
from tests.support.scripted_text import scripted

KEY = "a-key-of-sixteen"
ADMIN = "an-admin-key-of-more"
BODY = {"prompt": "x", "max_tokens": 1}


@pytest.fixture
def toy(tmp_path):
    return scripted(tmp_path, lambda prompt, seed: "yes")


def basic(key):
    return f"Basic {base64.b64encode(f'me:{key}'.encode()).decode()}"


def code_of(answer):
    return answer.status_code, answer.json()["error"]["code"] if answer.is_error else None


HOSTS = [
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
]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_host_must_be_ours(toy, method):
    with live(toy, allowed_hosts=("Models.Internal",)) as client:
        path = "/v1/models" if method == "GET" else "/v1/completions"
        for host, status in HOSTS:
            headers = {"Host": host.format(port=client.base_url.port)}
            answer = client.request(
                method, path, headers=headers, json=BODY if path[4] == "c" else None
            )
            assert code_of(answer) == (status, "cross_site" if status == 403 else None), host
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


SITES = [
    # Origin, Sec-Fetch-Site, status of a POST, status of a GET
    (None, None, 200, 200),  # curl -u, and programs
    ("http://{host}", None, 200, 200),  # the playground over plain http
    ("http://{host}", "same-origin", 200, 200),
    ("https://pages.internal:3", None, 200, 200),  # in allowed_hosts
    ("https://pages.internal:3", "same-site", 200, 200),
    ("https://shop.example", "same-origin", 200, 200),  # the playground behind a proxy
    (None, "none", 200, 200),  # an address that the user typed
    (None, "same-site", 403, 200),  # a link of another page
    (None, "cross-site", 403, 200),
    ("http://evil.example", None, 403, 403),
    ("http://evil.example", "same-site", 403, 403),
    ("http://127.0.0.1:1", None, 403, 403),
    ("null", None, 403, 403),
    ("null", "same-site", 403, 403),
    ("null", "none", 403, 403),
    ("", None, 403, 403),
    ("http://[", None, 403, 403),
]


@pytest.mark.parametrize("keys", [{"api_keys": (KEY,)}, {"insecure": True}])
def test_a_remembered_key_serves_own_pages_only(toy, keys):
    """A browser adds a Basic key to every request; only these two headers name the page."""
    with live(toy, admin_keys=(ADMIN,), allowed_hosts=("pages.internal",), **keys) as client:
        for origin, site, written, read in SITES:
            case = (origin, site)
            host = f"127.0.0.1:{client.base_url.port}"
            given = {"Origin": origin and origin.format(host=host), "Sec-Fetch-Site": site}
            headers = {name: value for name, value in given.items() if value is not None}
            # A client may write what it likes into X-Forwarded-Host.
            headers |= {"Content-Type": "text/plain", "X-Forwarded-Host": "evil.example"}
            headers["Authorization"] = basic(KEY)
            answer = client.post("/v1/completions", json=BODY, headers=headers)
            assert code_of(answer) == (written, "cross_site" if written == 403 else None), case
            assert client.get("/v1/models", headers=headers).status_code == read, case
            assert client.get("/health/ready", headers=headers).status_code == 200, case
            headers["Authorization"] = basic(ADMIN).replace("Basic", "bASIC")
            code = code_of(client.post("/admin/experiments/none:stop", headers=headers))[1]
            assert code == ("cross_site" if written == 403 else "unknown_experiment"), case
            # A page must know a Bearer key to send it.
            headers["Authorization"] = f"Bearer {KEY}"
            status = 403 if site == "cross-site" else 200
            answer = client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == status, case


@pytest.mark.parametrize(("origin", "status"), [("", b"200"), ("Origin: null\r\n", b"403")])
def test_a_remembered_key_without_a_host(toy, origin, status):
    with live(toy, api_keys=(KEY,)) as client, connect(client) as wire:
        wire.sendall(
            f"GET /v1/models HTTP/1.0\r\n{origin}Authorization: {basic(KEY)}\r\n\r\n".encode()
        )
        assert one_of(wire)[0].split()[1] == status


PAGE = """<!doctype html><form method=post enctype=text/plain action="{target}/v1/completions">
<input name='{{"prompt":"x","max_tokens":1,"user":"' value='"}}'></form>"""


@pytest.mark.slow
def test_a_browser_keeps_its_key_from_other_pages(toy, tmp_path):
    """Chromium remembers the key after a login. The playground works, a form elsewhere does not."""

    async def evil(request: web.Request) -> web.Response:
        return web.Response(text=PAGE.format(target=target), content_type="text/html")

    with (
        live(toy, api_keys=(KEY,)) as client,
        http_server(evil) as other,
        browser(tmp_path / "profile") as tab,
    ):
        target = str(client.base_url).rstrip("/")
        seen = []
        client.app.state.metrics.failure = lambda reason, code: seen.append(reason)
        tab.open(f"{target.replace('//', f'//me:{KEY}@')}/version")
        tab.open(target)
        tab.until("!document.getElementById('text-go').disabled")
        status = "fetch('/v1/completions', {{method: '{0}', body: '{1}'}}).then((a) => a.status)"
        assert tab.run(status.format("POST", '{"prompt": "x", "max_tokens": 1}')) == 200
        assert seen.count("unauthorized") == 1  # the first request, which had no key
        # Another port is the same site, another name another site.
        for address in (other, other.replace("127.0.0.1", "localhost")):
            tab.open(address)
            tab.run("void document.querySelector('form').submit()")
            tab.until("location.pathname === '/v1/completions' && document.body")
            assert "cross_site" in tab.run("document.body.textContent")
        assert seen.count("unauthorized") == 3
