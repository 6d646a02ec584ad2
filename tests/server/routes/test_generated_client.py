"""Clients that are generated from GET /openapi.json compile, and get slates."""

from __future__ import annotations

import json
import shutil
import subprocess
import venv
from typing import Any

import pytest

from recserve.config import ServerConfig
from recserve.server.app import create_app
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

TYPESCRIPT = ("orval@7.13.2", "openapi-typescript@7.13.0", "typescript@5.9.3")
GENERATOR = "openapi-python-client==0.29.1"
ASK = """
import sys
from generated import Client
from generated.api.open_inference_protocol import infer
from generated.api.recommend_and_rank import recommend
from generated.models import Diversity, InferRequest, InferTensor, RecommendRequest, UserRef

client = Client(base_url=sys.argv[1])
body = RecommendRequest(user=UserRef(id="user000001"), k=4, diversity=Diversity(prefix=[0, 2]))
print(" ".join(item.item_id for item in recommend.sync(client=client, body=body).items))
users = InferTensor(name="user_id", shape=[1], datatype="BYTES", data=["user000001"])
answer = infer.sync(client=client, body=InferRequest(inputs=[users]), name="recommend")
print(" ".join(answer.outputs[0].data))
"""


def arrays_of(schema: Any) -> list[dict[str, Any]]:
    """All schemas of arrays inside a description."""
    inner = schema.values() if isinstance(schema, dict) else schema
    own = [schema] if isinstance(schema, dict) and schema.get("type") == "array" else []
    nested = [one for one in inner if isinstance(one, dict | list)]
    return own + [array for one in nested for array in arrays_of(one)]


def test_arrays_are_described_as_generators_expect_them():
    described = create_app(ServerConfig(bundle="x")).openapi()
    arrays = arrays_of(described)
    assert len(arrays) > 50
    assert all(isinstance(one.get("items", {}), dict) for one in arrays)
    assert all("items" in one or "prefixItems" in one for one in arrays)
    fixed = [one for one in arrays if "prefixItems" in one]
    assert fixed and all(one["maxItems"] == len(one["prefixItems"]) for one in fixed)


def test_errors_are_described_in_the_form_of_their_path():
    described = create_app(ServerConfig(bundle="x")).openapi()
    forms = {
        path: methods.popitem()[1]["responses"]["default"]["content"]["application/json"]["schema"]
        for path, methods in described["paths"].items()
    }
    for path in ("/v2", "/v2/health/live", "/v2/models/{name}/infer"):
        assert forms[path] == {"$ref": "#/components/schemas/InferError"}
    for path in ("/v2/rerank", "/v1/recommend", "/health/live"):
        assert forms[path] == {"$ref": "#/components/schemas/ErrorResponse"}


@pytest.mark.slow
def test_generated_typescript_compiles(tmp_path):
    """No name of the description shadows one of TypeScript."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is missing, which installs the generators of TypeScript")
    (tmp_path / "package.json").write_text("{}")
    install = [npm, "install", "--no-audit", "--no-fund", *TYPESCRIPT]
    installed = subprocess.run(install, capture_output=True, text=True, cwd=tmp_path)
    if installed.returncode:
        pytest.skip(f"the generators cannot be installed: {installed.stderr[-200:]}")
    described = create_app(ServerConfig(bundle="x")).openapi()
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    programs = tmp_path / "node_modules" / ".bin"
    generate = ["--input", "openapi.json", "--output", "orval.ts", "--client", "fetch"]
    check = ["--strict", "--noEmit", "--skipLibCheck", "--target", "es2022", "--module", "es2022"]
    check += ["--moduleResolution", "bundler", "--lib", "es2022,dom,dom.iterable"]
    for command in (
        [programs / "orval", *generate],
        [programs / "openapi-typescript", "openapi.json", "-o", "types.ts"],
        [programs / "tsc", *check, "orval.ts", "types.ts"],
    ):
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


@pytest.mark.slow
def test_a_generated_client_gets_a_slate(tmp_path):
    """In an environment of its own, because the generator has other dependencies."""
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet", GENERATOR]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the generator cannot be installed: {installed.stderr[-200:]}")
    described = create_app(ServerConfig(bundle="x")).openapi()
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    generated = tmp_path / "generated"
    command = [programs / "openapi-python-client", "generate", "--meta", "none"]
    command += ["--fail-on-warning", "--output-path", generated]
    (tmp_path / "config.yaml").write_text("post_hooks: []\n")
    command += ["--path", tmp_path / "openapi.json", "--config", tmp_path / "config.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with live(Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")) as server:
        ask = [programs / "python", "-c", ASK, str(server.base_url)]
        ended = subprocess.run(ask, capture_output=True, text=True, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        said = ended.stdout.split("\n")
        body = {"user": {"id": "user000001"}, "k": 4, "diversity": {"prefix": [0, 2]}}
        alone = server.post("/v1/recommend", json=body).json()["items"]
        assert said[0].split() == [item["item_id"] for item in alone]
        alone = server.post("/v1/recommend", json={"user": {"id": "user000001"}}).json()["items"]
        assert said[1].split() == [item["item_id"] for item in alone]
