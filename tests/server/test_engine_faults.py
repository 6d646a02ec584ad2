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
from recserve.server.run import DrainingServer, end_process_in, uvicorn_config
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


def test_a_server_whose_engine_has_stopped_ends(tmp_path):
    config = ServerConfig(llm="given", port=0)
    service = scripted(tmp_path, lambda prompt, seed: "yes")
    app = create_app(config, service)
    server = DrainingServer(uvicorn_config(app, config), app.state.lifecycle, 0.0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started or not app.state.lifecycle.loaded.is_set():
        time.sleep(0.01)
    assert not app.state.lifecycle.engine_stopped
    service.engine.stopped_by = RuntimeError("the device is lost")
    thread.join(30)
    assert not thread.is_alive() and app.state.lifecycle.engine_stopped


def test_a_process_that_does_not_close_is_ended():
    statuses, ended = [], threading.Event()
    end_process_in(0.01, lambda status: (statuses.append(status), ended.set()))
    assert ended.wait(30) and statuses == [1]


@pytest.mark.slow
def test_sigterm_ends_a_process_whose_engine_hangs(tmp_path):
    arguments = [str(shared_bundle()), f"lmdb:{tmp_path}/store", str(free_port())]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RECSERVE_")}
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{arguments[2]}/health").status_code == 200:
                    break
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        assert "not closed 6.0 s after the signal" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
