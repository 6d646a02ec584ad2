"""GET /health says whether requests are taken now, as vLLM's does, and needs no key."""

import asyncio

import httpx
import pytest

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


def test_health_is_200_when_the_server_is_ready_and_needs_no_key(server):
    answer = server.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert server.get("/version").status_code == 401


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


def test_health_is_described(server):
    described = server.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert described["paths"]["/health"]["get"]["operationId"] == "health"
