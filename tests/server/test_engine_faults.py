"""What operators see of an engine that hangs or has stopped, and of a shutdown that hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from recserve.config import ServerConfig
from recserve.server.app import create_app
from recserve.server.run import DrainingServer, uvicorn_config
from tests.support.live_server import live
from tests.support.redis_server import free_port
from tests.support.scripted_text import scripted
from tests.support.tiny_bundle import shared_bundle

HANGING = """
import sys
from recserve.config import ServerConfig
from recserve.engine.engine import Engine
from recserve.server.run import serve
import threading
from recserve.engine.engine import Engine
Engine.close = lambda self: threading.Event().wait()
bundle, store, port = sys.argv[1:]
sys.exit(serve(ServerConfig(bundle=bundle, store=store, port=int(port), device="cpu",
                            drain_delay_s=0, drain_timeout_s=1)))
"""

HANGING_STORE = """
import sys, threading
from importlib.metadata import EntryPoint
from recserve.config import ServerConfig
from recserve.features.history import stores
from recserve.server.run import serve
from tests.support.partial_stores import MemoryStore


class Hanging(MemoryStore):
    blocks = True

    @classmethod
    def open(cls, url, options):
        return cls()

    def get_many(self, user_ids):
        if "late" in user_ids:
            threading.Event().wait()
        return super().get_many(user_ids)


stores.BUILT_IN += (EntryPoint("hanging", "__main__:Hanging", stores.GROUP),)
bundle, store, port = sys.argv[1:]
sys.exit(serve(ServerConfig(bundle=bundle, store=store, port=int(port), device="cpu",
                            drain_delay_s=0, drain_timeout_s=60)))
"""


def test_a_hanging_step_turns_ready_to_503(tmp_path, monkeypatch):
    service = scripted(tmp_path, lambda prompt, seed: "yes")
    with live(service, stall_timeout_s=20) as client:
        for seconds, status in ((0.0, 200), (19.0, 200), (21.0, 503), (0.0, 200)):
            service.engine.stalled_s = seconds
            for path in ("/health", "/health/ready", "/v2/health/ready"):
                assert client.get(path).status_code == status
            assert client.get("/health/live").status_code == 200
        service.engine.stalled_s = 21.0
        message = client.get("/health/ready").json()["error"]["message"]
        assert message == "a step of the engine has been running for 21 s"


@pytest.mark.parametrize("hangs", [False, True], ids=["closes", "hangs"])
def test_a_server_whose_engine_has_stopped_ends(tmp_path, monkeypatch, hangs):
    """Also if engine or store do not close: then the timer ends the process."""
    config = ServerConfig(llm="given", port=0, drain_timeout_s=1)
    service = scripted(tmp_path, lambda prompt, seed: "yes")
    app = create_app(config, service)
    statuses, released, lifecycle = [], threading.Event(), app.state.lifecycle
    if hangs:
        monkeypatch.setattr(service, "close", lambda: released.wait(60))
        monkeypatch.setattr("recserve.server.run.CLOSE_S", 0.0)

    def end(status):
        statuses.append(status)
        released.set()

    server = DrainingServer(uvicorn_config(app, config), lifecycle, 0.0, end)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started or not lifecycle.loaded.is_set():
        time.sleep(0.01)
    assert not lifecycle.engine_stopped
    service.engine.stopped_by = RuntimeError("the device is lost")
    thread.join(30)
    assert not thread.is_alive() and lifecycle.engine_stopped
    assert not hangs or statuses == [1]


@contextlib.contextmanager
def served(script, store):
    """Runs a server in a process, and yields the process and its address once it is ready."""
    arguments = [str(shared_bundle()), store, str(free_port())]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RECSERVE_")}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{arguments[2]}"
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_sigterm_ends_a_process_whose_engine_hangs(tmp_path):
    with served(HANGING, f"lmdb:{tmp_path}/store") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        assert "not closed within 6.0 s" in process.stderr.read()


@pytest.mark.slow
def test_a_store_that_hangs_does_not_hold_up_a_drained_server():
    """The process ends by itself, long before the drain timeout would end it."""
    with served(HANGING_STORE, "hanging:here") as (process, url):
        body = {"user": {"id": "late"}, "k": 3}
        answer = httpx.post(f"{url}/v1/recommend", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["degraded"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == 0
