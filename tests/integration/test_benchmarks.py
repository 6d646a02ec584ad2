"""Benchmarks can be imported, and the one of the GPU runs from end to end without one."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import pytest

import benchmarks
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

# As on a machine that has torch, numpy, safetensors and triton, and nothing else: python runs this
# at its start, in the parts' processes too.
BARE = """
import sys
for name in ("pyarrow", "faiss", "fastapi", "lmdb", "redis", "msgspec", "sklearn", "transformers",
             "scipy", "pydantic", "pytest", "prometheus_client", "tokenizers", "matplotlib"):
    sys.modules[name] = None
"""
# What they compare with, which the development environment lacks.
FOREIGN = {"rectools", "schemathesis", "llama_cpp", "pytorch_lightning"}


def test_every_benchmark_can_be_imported():
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        if not module.name.endswith("__main__") and module.name != "benchmarks.gpu":
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name in FOREIGN, module.name


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(tmp_path)
    path = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--smoke", "--all"]
    done = subprocess.run(
        [*command, "--json", path],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    content = json.loads(path.read_text())
    assert len(content["checks"]) > 50 and all(check["ok"] for check in content["checks"])
    assert all(content[part] for part in ("goals", "attention", "kernels", "engine", "text"))
    assert len(content["goals"]) == 7 and any("HTTP" in row["cut"] for row in content["cut"])
