"""A plain server imports no code of experiments and of trained drafters, whatever it is asked."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import reference
from tests.support.tiny_bundle import shared_bundle

PLAIN = """
import json, sys
from pathlib import Path
from recserve.config import ServerConfig
from recserve.server.loader import ServiceLoader
from recserve.drafters.names import BUILT_IN, WEIGHTLESS
from tests.support.live_server import live

def imported():
    mine = "recserve.experiments", "recserve.server.experiments", "recserve.server.remote_arm"
    trained = [file.rpartition(".")[0] for name, file in BUILT_IN.items() if name not in WEIGHTLESS]
    return sorted(
        name for name in sys.modules if name.startswith((*mine, "recserve.client", *trained))
    )

bundle, llm, folder = sys.argv[1:]
key = "an-admin-key-of-24-chars"
config = dict(llm=Path(llm), llm_name="tiny", device="cpu", kv_bytes=2**24, admin_keys=[key])
config |= dict(store=f"lmdb:{folder}/store", journal=Path(folder) / "journal")
service = ServiceLoader(ServerConfig(bundle=Path(bundle), **config)).first()
statuses, found = {}, {}
with live(service, **config) as client:
    found["start"] = imported()
    user, item = (client.get("/playground/samples").json()[name][0] for name in ("users", "items"))
    text = {"model": "tiny", "prompt": "Once", "max_tokens": 3}
    chosen = [{"item_id": item}]
    tensor = {"name": "user_id", "shape": [1], "datatype": "BYTES", "data": [user]}
    event = {"user_id": user, "item_id": item, "type": "click"}
    bodies = {
        "/v1/recommend": {"user": {"id": user}},
        "/v1/rank": {"user": {"id": user}, "candidates": chosen},
        "/v1/rank:batch": {"requests": [{"user": {"id": user}, "candidates": chosen}]},
        "/v2/models/recommend/infer": {"inputs": [tensor]},
        "/v1/events": {"events": [event]},
        "/v1/completions": text,
        "/v1/completions?stream": {**text, "stream": True},
        "/v1/embeddings": {"model": "tiny", "input": "Once"},
        "/v1/rerank": {"model": "tiny", "query": "Once", "documents": ["a", "b"]},
        "/generative_scoring": {
            "model": "tiny", "query": "Once", "items": ["a"], "label_token_ids": [1, 2]
        },
        "/tokenize": {"model": "tiny", "prompt": "Once"},
    }
    for path, body in bodies.items():
        statuses[path] = client.post(path, json=body).status_code
    client.put("/v1/items", json={"items": [{"item_id": item, "title": "new"}]})
    client.headers["authorization"] = f"Bearer {key}"
    assert client.post("/admin/experiments/none:stop").status_code == 404
    assert client.get("/v1/experiments").json() == {"experiments": []}
    named = {"name": "recommend", "version": "x", "item_id": item, "user_id": user}
    for route in client.app.routes:
        if "GET" in route.methods:
            path = route.path.replace(":path}", "}").format_map(named)
            assert client.get(path).status_code in (200, 404), path
    found["requests"] = imported()
print(json.dumps([found, statuses]))
"""


@pytest.mark.slow
def test_a_plain_server_imports_neither_experiments_nor_trained_drafters(tmp_path):
    llm = reference("stories260k")
    arguments = str(shared_bundle()), str(llm), str(tmp_path)
    command = [sys.executable, "-c", PLAIN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, statuses = json.loads(done.stdout.splitlines()[-1])
    assert found == {"start": [], "requests": []}
    refused = {path: status for path, status in statuses.items() if status != 200}
    assert refused == {}
