"""The log: one style, structured fields, no user data, repeated warnings limited."""

import json
import logging
import subprocess
import sys
import time

import httpx
import pytest

from recserve.server.telemetry.logs import (
    BURST,
    WINDOW_S,
    JsonFormatter,
    RepeatFilter,
    TextFormatter,
    fields,
)
from recserve.service import Service
from tests.support.live_server import live
from tests.support.paths import ROOT
from tests.support.redis_server import free_port
from tests.support.tiny_bundle import shared_bundle


def record(message: str = "store failed: %s", level=logging.WARNING, line=1, error=None, **own):
    info = (type(error), error, None) if error is not None else None
    made = logging.LogRecord("recserve.x", level, "x.py", line, message, ("why",), info)
    vars(made).update(fields(**own) if own else {})
    return made


def test_json_lines_hold_the_fields_and_the_exception():
    line = json.loads(JsonFormatter().format(record(error=KeyError("k"), status=503)))
    assert (line["level"], line["logger"], line["status"]) == ("warning", "recserve.x", 503)
    assert line["message"] == "store failed: why" and "KeyError: 'k'" in line["exception"]
    assert line["time"].endswith("+00:00")
    assert "\n" not in JsonFormatter().format(record("%s", own="a\nb"))


def test_text_lines_have_the_fields_behind_the_message():
    assert TextFormatter().format(record(status=503)) == "WARNING   store failed: why status=503"


def test_repeated_warnings_are_dropped_and_counted():
    now = 0.0
    kept = RepeatFilter(lambda: now)
    assert sum(kept.filter(record()) for _ in range(100)) == BURST
    assert kept.filter(record(line=2)) and kept.filter(record(error=KeyError()))
    assert all(kept.filter(record(level=logging.INFO)) for _ in range(100))
    now = WINDOW_S
    after = record(status=503)
    assert kept.filter(after)
    assert TextFormatter().format(after).endswith("status=503 dropped_before=95")


def test_a_line_of_a_request_has_no_user_data(tmp_path, caplog):
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    with (
        live(service, access_log=True) as client,
        caplog.at_level(logging.INFO, "recserve"),
    ):
        headers = {"X-Request-Id": "req-1"}
        body = {"user": {"id": "secret-user"}, "k": 3}
        assert client.post("/v1/recommend", json=body, headers=headers).status_code == 200
        assert client.get("/v1/users/secret-user/history?q=secret").status_code == 200
        assert client.get("/secret-path").status_code == 404
    lines = [JsonFormatter().format(r) for r in caplog.records if r.name.startswith("recserve")]
    assert not any("secret" in line for line in lines)
    found = [line for line in map(json.loads, lines) if line["logger"] == "recserve.access"]
    routes = [(line["method"], line["route"], line["status"]) for line in found]
    assert ("POST", "/v1/recommend", 200) in routes and ("GET", "other", 404) in routes
    assert ("GET", "/v1/users/{user_id:path}/history", 200) in routes
    (first,) = (line for line in found if line["request_id"] == "req-1")
    assert first["strategy"] == "popular" and first["ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("style", ["json", "text"])
def test_a_server_logs_requests_without_user_data(style, tmp_path):
    port = free_port()
    command = [
        *(sys.executable, "-m", "recserve", "serve", "--bundle", str(shared_bundle())),
        *("--port", str(port), "--store", f"lmdb:{tmp_path}/store", "--log-format", style),
    ]
    config = tmp_path / "server.yaml"
    config.write_text(f"access_log: true\njournal: {tmp_path}/journal\n", encoding="utf-8")
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen([*command, "--config", str(config)], cwd=ROOT, stderr=out)
    try:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if client.get("/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        headers = {"X-Request-Id": "req-1"}
        body = {"user": {"id": "secret-user"}, "k": 3}
        assert client.post("/v1/recommend", json=body, headers=headers).status_code == 200
        assert client.get("/v1/users/secret-user/history?q=secret").status_code == 200
        assert client.get("/secret-path").status_code == 404
    finally:
        server.terminate()
        server.wait(60)
    text = log.read_text()
    assert "secret" not in text and "Uvicorn running" in text
    lines = text.splitlines()
    if style == "json":
        requests = [one for one in map(json.loads, lines) if one["logger"] == "recserve.access"]
        found = next(one for one in requests if one["request_id"] == "req-1")
        assert (found["method"], found["route"], found["status"]) == ("POST", "/v1/recommend", 200)
        assert found["strategy"] == "popular" and found["ms"] > 0
        assert {"other", "/v1/users/{user_id:path}/history"} <= {one["route"] for one in requests}
    else:
        assert any(
            line.startswith("INFO      request method=POST route=/v1/recommend status=200 ms=")
            and line.endswith("strategy=popular request_id=req-1")
            for line in lines
        )
