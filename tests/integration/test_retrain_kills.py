"""A retrain that is killed in drawn steps ends in the same bundle, and loads it once."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.schemas.items import ItemsRequest
from recserve.service import Service, ServiceOptions
from tests.support.retrain_settings import quick_settings
from tests.support.tiny_bundle import NUM_ITEMS, NUM_USERS, tiny_bundle

STEPS = ["collect", "build", "train recommender", "gate", "publish", "load", "watch"]
LOAD_S, LONGEST_S = 1.0, 300.0


class StandIn(BaseHTTPRequestHandler):
    """A server whose loads take a second."""

    def do_GET(self):
        if self.path == "/metrics":
            return self.reply(b'recserve_request_seconds_count{route="/v1/recommend"} 7\n')
        server = self.server
        busy = time.monotonic() < server.ready_at
        path = server.loads[-1] if server.loads and not busy else "bundle"
        current = {"path": path, "model_version": "m", "catalog_version": "c"}
        state = "loading" if busy else "ready"
        fields = {"current": current, "previous": None, "message": "", "progress": 0.5}
        self.reply(json.dumps({**fields, "state": state}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.loads.append(body["path"])
        self.server.ready_at = time.monotonic() + LOAD_S
        self.do_GET()

    def reply(self, body):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.loads, server.ready_at = [], 0.0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def start(file):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "recserve", "retrain", str(file)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def digest(folder):
    """Returns a hash of all files of a bundle and of its manifest without durations."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {name: (folder / name).read_bytes() for name in sorted(manifest["files"])}
    for section in manifest["sections"].values():
        section.pop("seconds", None)
    found = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
    for content in files.values():
        found.update(content)
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_runs_end_in_the_same_bundle(tmp_path, server, seed):
    draw = random.Random(seed)
    bundle = tiny_bundle(tmp_path, ranker=False)
    files = write_synthetic(tmp_path / "data", SyntheticOptions(NUM_ITEMS, NUM_USERS, 12, seed=3))
    options = ServiceOptions(journal=tmp_path / "items")
    with Service.open(bundle, f"lmdb:{tmp_path}/store", "cpu", options) as service:
        service.put_items(ItemsRequest(items=[{"item_id": "live", "title": "Lamp"}]))
        event = {"user_id": "anna", "item_id": "live", "timestamp": "2026-11-20T08:00:00Z"}
        service.add_events({"events": [event]})
    common = quick_settings(files, epochs=2) | {
        "store": f"lmdb:{tmp_path}/store",
        "journal": str(tmp_path / "items"),
    }
    found = []
    for name, kills in (("straight", []), ("killed", draw.sample(STEPS, 3))):
        folder = tmp_path / name
        shutil.copytree(bundle, folder / "bundle")
        server.loads.clear()
        own = {"bundles_dir": ".", "runs": "runs", "served": "bundle"}
        own["url"] = f"http://127.0.0.1:{server.server_port}"
        (folder / "retrain.yaml").write_text(yaml.safe_dump(common | own))
        record = folder / "runs" / "0001" / "run.json"
        for step in sorted(kills, key=STEPS.index):
            process, began = start(folder / "retrain.yaml"), time.monotonic()
            while process.poll() is None and time.monotonic() < began + LONGEST_S:
                if record.exists() and step in json.loads(record.read_text()).get("tries", {}):
                    break
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.5))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        process = start(folder / "retrain.yaml")
        _, errors = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 0, errors.decode()
        assert json.loads(record.read_text())["outcome"] == "served"
        assert server.loads == ["retrained-0001"], kills
        found.append(digest(folder / "retrained-0001"))
    assert found[0] == found[1]
