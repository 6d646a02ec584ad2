"""`recserve retrain --every` renews the bundle of two real servers that share a catalogue."""

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
import yaml

from benchmarks.campaign.site import ADMIN, ADMIN_KEY, SERVE, ServerProcess
from recserve.bundle.bundle import Bundle
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from tests.support.retrain_settings import quick_settings
from tests.support.tiny_bundle import NUM_ITEMS, NUM_USERS, tiny_bundle

LONGEST_S = 300.0


def current(server):
    """Returns the name of the bundle that a server serves."""
    status = httpx.get(f"{server.url}/admin/bundle", headers=ADMIN, timeout=60).json()
    return status["current"]["path"]


@pytest.mark.slow
def test_all_servers_get_each_new_bundle(tmp_path, empty_redis, redis_url):
    """What users do at one server and items that come at the other are in the next bundle."""
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    tiny_bundle(tmp_path, ranker=False).rename(bundles / "first")
    (bundles / "current").symlink_to("first")
    files = write_synthetic(tmp_path / "data", SyntheticOptions(NUM_ITEMS, NUM_USERS, 12, seed=3))
    settings = {
        "bundle": bundles / "current",
        "bundles_dir": bundles,
        "store": redis_url,
        "catalog_log": "redis",
        "admin_keys": ADMIN_KEY,
        "signing_key": "a-key-of-the-test",
        "event_log": tmp_path / "events.log",
        "event_log_rotate_s": 0.5,
    }
    config = quick_settings(files, epochs=1) | {
        "event_log": "events.log",
        "catalog_log": "redis",
        "bundles_dir": "bundles",
        "link": "current",
        "runs": "runs",
        "fleet": True,
        "keep_bundles": 2,
    }
    servers, retrain = [], None
    try:
        for number in range(2):
            servers.append(ServerProcess(tmp_path / f"server{number}", settings, SERVE))
        for server in servers:
            server.until_ready()
        config["url"] = servers[0].url
        config["metrics"] = [server.url for server in servers]
        (tmp_path / "retrain.yaml").write_text(yaml.safe_dump(config))
        item = {"item_id": "live", "title": "Lamp"}
        event = {"user_id": "anna", "item_id": "live", "timestamp": "2026-11-20T08:00:00Z"}
        with servers[1].client(headers=ADMIN) as client:
            client.put("/v1/items", json={"items": [item]}).raise_for_status()
        with servers[0].client() as client:
            deadline = time.monotonic() + LONGEST_S
            while client.post("/v1/events", json={"events": [event]}).status_code != 200:
                assert time.monotonic() < deadline  # the item comes over Redis
                time.sleep(0.1)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RECSERVE_ADMIN_KEYS": ADMIN_KEY}
        command = [sys.executable, "-m", "recserve", "retrain", str(tmp_path / "retrain.yaml")]
        retrain = subprocess.Popen(
            [*command, "--every", "1s"],
            env=environment | {"RECSERVE_STORE": redis_url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        third, oldest = tmp_path / "runs" / "0003" / "run.json", bundles / "retrained-0001"
        deadline = time.monotonic() + LONGEST_S
        while not third.exists() or oldest.exists():  # it goes at the end of the third run
            assert retrain.poll() is None and time.monotonic() < deadline, retrain.stdout.read()
            time.sleep(0.1)
        retrain.send_signal(signal.SIGTERM)
        said = retrain.communicate(timeout=60)[0].decode()
        record = json.loads(third.read_text())
        assert record["outcome"] == "served", said
        assert all(current(server) == "retrained-0003" for server in servers)
        assert (bundles / "current").resolve().name == "retrained-0003"
        assert "anna" in Bundle.open(bundles / "current").events().user_ids
        for server in servers:
            found = server.post("/v1/recommend", {"user": {"id": "anna"}, "k": 5}).json()
            assert found["items"] and not found.get("degraded")
            with server.client() as client:
                assert client.get("/v1/items/live").json()["title"] == "Lamp"
    finally:
        for process in (*(server.process for server in servers), retrain):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
