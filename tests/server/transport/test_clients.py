"""One client cannot fill a queue, and texts leave the queue of recommendations alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from starlette.applications import Starlette

from recserve.config import ConfigError, ServerConfig
from recserve.engine.engine_config import EngineConfig
from recserve.metrics import Metrics
from recserve.server.access import client_address
from recserve.server.run import uvicorn_config
from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle
from tests.support.tiny_llm import tiny_llm
from tests.support.waiting import until

ONE, TWO = "the-first-key-of-two", "the-second-key-of-two"
ITEMS = [f"item{number:06d}" for number in (3, 7, 31)]


@pytest.fixture
def service(tmp_path):
    text = load_text(TextSettings(tiny_llm(tmp_path / "toy")), torch.device("cpu"))
    options = ServiceOptions(EngineConfig(max_queue=8, load_aware=False), text=text)
    return Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu", options)


def wait_for_depth(service, depth):
    until(lambda: service.engine.stats().queue_depth == depth)


def test_each_key_has_its_share_and_each_model_its_queue(service):
    def send(key, path, **body):
        headers = {"Authorization": f"Bearer {key}"}
        return client.post(path, json={**body, "timeout_ms": 60_000}, headers=headers)

    text = {"path": "/v1/completions", "prompt": ["a", "b", "c"], "max_tokens": 2}
    slate = {"path": "/v1/recommend", "history": ITEMS, "k": 3}
    rank = {"path": "/v1/rank", "history": ITEMS, "candidates": [{"item_id": ITEMS[0]}]}
    with live(service, api_keys=(ONE, TWO)) as client, ThreadPoolExecutor(8) as pool:
        with service.engine.held():
            running = [pool.submit(send, ONE, **text)]
            wait_for_depth(service, 3)
            refused = send(ONE, **text)
            assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
            error = refused.json()["error"]
            assert error["code"] == "queue_full" and "queue_share 0.5" in error["message"]
            running.append(pool.submit(send, TWO, **{**text, "prompt": ["d", "e"]}))
            wait_for_depth(service, 5)
            running += [pool.submit(send, key, **it) for key in (ONE, TWO) for it in (slate, rank)]
            wait_for_depth(service, 9)
        assert [one.result().status_code for one in running] == [200] * 6
        for path, field in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
            large = send(TWO, path, **{field: [[1]] * 5})
            assert large.status_code == 400, large.text
            assert "needs 5 places" in large.json()["error"]["message"]


def test_without_keys_a_client_is_an_address(service):
    """A key of the client's choice makes no second client."""
    body = {"prompt": ["a", "b", "c"], "max_tokens": 2}
    with live(service) as client, ThreadPoolExecutor(1) as pool:
        with service.engine.held():
            first = pool.submit(client.post, "/v1/completions", json=body)
            wait_for_depth(service, 3)
            for key in ("x", "y"):
                headers = {"Authorization": f"Bearer {key}"}
                refused = client.post("/v1/completions", json=body, headers=headers)
                assert refused.status_code == 429
        assert first.result().status_code == 200


@pytest.mark.parametrize(
    "host, client",
    [
        ("10.0.0.7", b"10.0.0.7"),
        ("::ffff:10.0.0.7", b"10.0.0.7"),
        ("2001:db8::1", b"2001:db8::/64"),
        ("2001:db8::ffff:1%eth0", b"2001:db8::/64"),
        ("no: address", b"no: address"),
        ("", b"unknown"),
    ],
)
def test_addresses(host, client):
    assert client_address({"client": (host, 1)}) == client


def test_a_connection_without_an_address_is_a_client_too():
    assert client_address({"client": None}) == client_address({}) == b"unknown"


@pytest.mark.parametrize(
    "proxies, sender, forwarded, client",
    [
        ((), "127.0.0.1", "1.2.3.4", b"127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1", "1.2.3.4", b"1.2.3.4"),
        (("127.0.0.1",), "127.0.0.1", "9.9.9.9, 1.2.3.4", b"1.2.3.4"),
        (("10.0.0.0/8",), "10.1.1.1", "1.2.3.4, 10.2.2.2", b"1.2.3.4"),
        (("10.0.0.0/8",), "8.8.8.8", "1.2.3.4", b"8.8.8.8"),
    ],
)
def test_only_trusted_proxies_name_the_client(proxies, sender, forwarded, client, tmp_path):
    found = []

    async def probe(scope, receive, send):
        found.append(client_address(scope))

    app = Starlette()
    app.state.metrics = Metrics((), (), lambda: None)
    config = uvicorn_config(app, ServerConfig(llm=tmp_path, trusted_proxies=proxies))
    config.app = probe
    config.load()
    headers = [(b"x-forwarded-for", forwarded.encode())]
    scope = {"type": "http", "client": (sender, 1), "headers": headers, "asgi": {}}
    asyncio.run(config.loaded_app(scope, None, None))
    assert found == [client]


def test_a_proxy_that_is_no_address_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trusted_proxies.*'proxy.local'"):
        ServerConfig.load({"llm": tmp_path, "trusted_proxies": "10.0.0.1, proxy.local"})
