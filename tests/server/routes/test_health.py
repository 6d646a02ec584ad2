"""GET /health says whether requests are taken now, as vLLM's does, and needs no key."""

import asyncio

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from recserve.config import ServerConfig
from recserve.server.app import create_app
from tests.support.live_server import live
from tests.support.scripted_text import scripted

KEY = "a-key-of-sixteen"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    served = scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes")
    with live(served, api_keys=(KEY,)) as running:
        yield running


def not_ready(message):
    return {
        "error": {
            "message": message,
            "type": "unavailable_error",
            "param": None,
            "code": "not_ready",
        }
    }


def test_health_is_503_while_draining(server):
    lifecycle = server.app.state.lifecycle
    lifecycle.draining = True
    try:
        answer = server.get("/health")
    finally:
        lifecycle.draining = False
    assert (answer.status_code, answer.json()) == (503, not_ready("the server is shutting down"))
    assert answer.headers["retry-after"] == "1"


def test_health_is_503_while_loading(tmp_path):
    app = create_app(
        ServerConfig(llm="given"), scripted(tmp_path, lambda prompt, seed: "yes")
    )  # its lifespan never begins, so nothing is loaded

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/health")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()) == (503, not_ready("the server is loading"))


TEXT = "text/plain; version=1.0.0; charset=utf-8"
OLD_TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        (PROMETHEUS, OPENMETRICS),
        ("application/vnd.google.protobuf;encoding=delimited;q=0.7," + PROMETHEUS, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ('Application/OpenMetrics-Text; version="1.0.0"; charset=utf-8', OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;q=0.1, text/plain;q=0.9", TEXT),
        ("text/plain;q=0.1, application/openmetrics-text;q=0.9", OPENMETRICS),
        ("text/plain;version=0.0.4", OLD_TEXT),
        ("application/json", TEXT),
        ("application/openmetrics-text;version=1.x;q=high, ;;,=", TEXT),
    ],
)
def test_metrics_have_the_format_that_is_asked_for(server, accept, expected):
    headers = {"Authorization": f"Bearer {KEY}", "Accept": accept}
    answer = server.get("/metrics", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, expected)
    assert answer.headers["vary"] == "Accept"
    read = read_openmetrics if expected == OPENMETRICS else read_text
    names = {family.name for family in read(answer.text)}
    assert {"recserve_request_seconds", "recserve_requests_failed"} <= names
    assert answer.text.endswith("# EOF\n") == (expected == OPENMETRICS)
