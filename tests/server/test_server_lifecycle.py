"""A server from loading to the end: not ready, ready, draining, gone; counted by Prometheus."""

import gc
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest

from recserve.config import ServerConfig
from recserve.metrics import STAGES
from recserve.server.errors import REASONS, NotReady
from recserve.server.lifecycle import Lifecycle
from recserve.service import Service
from tests.support.live_server import live
from tests.support.redis_server import free_port
from tests.support.tiny_bundle import shared_bundle
from tests.support.waiting import until

SERVE = """
import sys
from pathlib import Path
from recserve.config import ServerConfig
from recserve.server.run import serve
bundle, store, port, delay = sys.argv[1:]
config = dict(bundle=Path(bundle), store=store, port=int(port), device="cpu", threads=1)
sys.exit(serve(ServerConfig(**config, kv_bytes=2**24, drain_delay_s=float(delay))))
"""


def ask(url: str) -> int | None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=5)
    try:
        connection.request("GET", address.path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RECSERVE_")}
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_drains_and_loses_nothing(tmp_path):
    """While requests run: SIGTERM, ready is 503, new work is 503, what runs is answered, exit 0.

    Clients keep their connections and go on until the port is closed.
    """
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    server = started(str(shared_bundle()), f"lmdb:{tmp_path}/store", str(port), "1.5")
    try:
        until(lambda: ask(base + "/health/ready") == 200)
        user = httpx.get(base + "/playground/samples").json()["users"][0]
        body = {"user": {"id": user}, "k": 20}
        statuses: list[int] = []
        encoded, lost = json.dumps(body), []

        def load():
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            while True:
                try:
                    client.connect()
                except OSError:
                    return
                try:
                    while client.sock is not None:  # closed after `Connection: close`
                        client.request("POST", "/v1/recommend", encoded)
                        answer = client.getresponse()
                        statuses.append(answer.status)
                        answer.read()
                        time.sleep(0.05)
                except (OSError, http.client.HTTPException) as error:
                    lost.append(repr(error))
                    client.close()

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(statuses) >= 8)
        server.send_signal(signal.SIGTERM)
        until(lambda: ask(base + "/health/ready") == 503)
        assert ask(base + "/health/live") == 200
        refused = httpx.post(base + "/v1/recommend", json=body)
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "not_ready"
        for thread in threads:
            thread.join()
        assert server.wait(30) == 0 and not lost
        assert set(statuses) <= {200, 503} and statuses.count(200) >= 8
    finally:
        server.kill()
        server.communicate()


LOADING = """
import subprocess, sys, threading, time
from pathlib import Path
from recserve.config import ServerConfig
from recserve.server.loader import ServiceLoader
from recserve.server.run import serve

UNUSED = "recserve.experiments", "recserve.server.experiments", "recserve.client"

def load(self):
    print("loading", *(name for name in sys.modules if name.startswith(UNUSED)), flush=True)
    way = sys.argv[1]
    if way == "wait":
        threading.Event().wait()
    elif way == "compute":
        while True:
            sum(range(10_000))
    else:
        subprocess.run([sys.executable, "-c", "import sys; sys.stdin.read()"])

ServiceLoader.first = load
config = ServerConfig(llm=Path("x"), port=int(sys.argv[2]), drain_delay_s=600, drain_timeout_s=600)
sys.exit(serve(config))
"""


@pytest.mark.parametrize(
    ("way", "sent"),
    [
        ("compute", signal.SIGTERM),
        pytest.param("wait", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("process", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_loading_ends_the_server_at_once(way, sent):
    """Waiting for the load or for the drain would take longer than this test waits."""
    port = free_port()
    command = [sys.executable, "-c", LOADING, way, str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as server:
        try:
            # A server without experiments has imported nothing of them.
            assert server.stdout.readline() == "loading\n"
            if way == "wait":
                until(lambda: ask(f"http://127.0.0.1:{port}/health/ready") == 503)
            server.send_signal(sent)
            assert server.wait(60) == 0
            server.stdin.close()
            said = server.stderr.read()
            assert f"{sent.name} while loading" in said and "Traceback" not in said
        finally:
            server.kill()


SWAPPING = """
import sys, threading
from pathlib import Path
from recserve.config import ServerConfig
from recserve.server.loader import ServiceLoader
from recserve.server.run import serve

def successor(self, old, bundle):
    print("swapping", flush=True)
    if sys.argv[4] == "compute":
        while True:
            sum(range(10_000))
    threading.Event().wait()

ServiceLoader.successor = successor
shelf, store, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = dict(bundle=shelf / "one", bundles_dir=shelf, admin_keys=["an-admin-key-of-some-length"])
config |= dict(store=store, port=port, device="cpu", threads=1, kv_bytes=2**22)
sys.exit(serve(ServerConfig(**config, drain_delay_s=0, drain_timeout_s=600)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wait", "compute"])
def test_a_signal_while_a_bundle_is_loaded_does_not_wait_for_it(way, tmp_path):
    port, key = free_port(), {"Authorization": "Bearer an-admin-key-of-some-length"}
    base = f"http://127.0.0.1:{port}"
    for name in ("one", "two"):
        shutil.copytree(shared_bundle(), tmp_path / "shelf" / name)
    command = [sys.executable, "-c", SWAPPING, f"{tmp_path}/shelf", f"lmdb:{tmp_path}/store"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, str(port), way], text=True, **pipes) as server:
        try:
            until(lambda: ask(base + "/health/ready") == 200)
            answer = httpx.post(base + "/admin/bundle:load", json={"path": "two"}, headers=key)
            assert answer.status_code in (200, 202)
            assert server.stdout.readline() == "swapping\n"
            assert ask(base + "/health/ready") == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            said = server.stderr.read()
            assert "the process ends without it" in said and "Traceback" not in said
        finally:
            server.kill()


def loading(first):
    """A lifecycle whose service a function opens."""
    loader = SimpleNamespace(config=ServerConfig(bundle="b"), first=first)
    return Lifecycle(loader, None)


@pytest.mark.slow
def test_a_bundle_that_cannot_be_served_ends_the_process(tmp_path):
    (tmp_path / "empty").mkdir()
    server = started(str(tmp_path / "empty"), f"lmdb:{tmp_path}/store", str(free_port()), "0")
    _, said = server.communicate(timeout=60)
    assert server.returncode == 1
    assert "ERROR     the service could not be started: " in said and "manifest.json" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("error, traced", [(ValueError("no"), False), (KeyboardInterrupt(), True)])
def test_only_what_nobody_foresaw_is_logged_with_its_trace(error, traced, caplog):
    def load():
        raise error

    caplog.set_level("INFO", "recserve")
    lifecycle = loading(load)
    lifecycle.start()
    assert lifecycle.loaded.wait(10) and lifecycle.failure is error
    assert [bool(record.exc_info) for record in caplog.records] == [traced]


def test_worker_says_why_it_is_not_ready():
    gate = threading.Event()

    def load() -> Service:
        gate.wait()
        raise ValueError("/secret/path is broken")

    lifecycle = loading(load)
    lifecycle.start()
    with pytest.raises(NotReady, match="loading"):
        _ = lifecycle.service
    assert lifecycle.gauges() is None
    gate.set()
    lifecycle.loaded.wait()
    with pytest.raises(NotReady, match="could not start") as caught:
        _ = lifecycle.service
    assert "secret" not in str(caught.value)
    lifecycle.draining = True
    with pytest.raises(NotReady, match="shutting down"):
        _ = lifecycle.service
    lifecycle.close()


def series(client: httpx.Client) -> set[str]:
    lines = client.get("/metrics").text.splitlines()
    return {line.rsplit(" ", 1)[0] for line in lines if line and line[0] != "#"}


def test_metrics_have_their_names_and_labels_from_closed_sets(tmp_path):
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    user = service.samples(1, 1)["users"][0]
    item = service.samples(1, 1)["items"][0]
    with live(service) as client:

        def mixture(word: str) -> None:
            client.post("/v1/recommend", json={"user": {"id": user}, "request_id": word})
            client.post("/v1/recommend", json={"user": {"id": word}})
            client.post("/v1/recommend", json={"user": {"id": user}, "strategy": word})
            client.post("/v1/rank", json={"history": [item], "candidates": [{"item_id": item}]})
            for path in (f"/v1/items/{word}", f"/{word}", f"/v1/users/{word}/history"):
                client.get(path)
            client.request(word.upper()[:6], "/v1/recommend")

        mixture("first")
        series(client)  # asking for metrics is a request of its own
        before = series(client)
        rng = random.Random(1)
        for _ in range(12):
            mixture("".join(rng.choices("abcdefghij", k=8)))
        assert series(client) == before
        text = client.get("/metrics").text
    for name in (
        *("recserve_request_seconds_bucket", "recserve_stage_seconds_bucket"),
        *("recserve_queue_depth", "recserve_requests_failed_total", "recserve_kv_pages"),
        *("recserve_prefix_cache_tokens_total", "recserve_recommend_rounds_bucket"),
        "recserve_illegal_items_total",
    ):
        assert f"\n{name}" in text
    assert "\nrecserve_illegal_items_total 0.0" in text
    for stage in STAGES:
        assert f'recserve_stage_seconds_count{{stage="{stage}"}}' in text
    for reason in REASONS:
        assert f'reason="{reason}"' in text
    assert 'route="/v1/recommend",strategy="speculative"' in text
    assert 'route="/v1/recommend",strategy="popular"' in text
    assert 'route="/v1/rank",strategy="ranker"' in text


def test_the_collector_keeps_its_hands_off_what_lives_as_long_as_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.live_server.COLLECTOR", gc)
    gc.unfreeze()
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    with live(service):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as tests/conftest.py does
