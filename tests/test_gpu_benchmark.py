"""benchmarks/gpu.py on a machine without a GPU: its logic at tiny sizes, and its refusal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# As on a machine that has torch, numpy, safetensors and triton, and nothing else.
BARE = """
import runpy, sys
for name in ("pyarrow", "faiss", "fastapi", "lmdb", "redis", "msgspec", "sklearn", "transformers",
             "scipy", "pydantic", "pytest", "prometheus_client", "tokenizers", "matplotlib"):
    sys.modules[name] = None
sys.path.insert(0, "benchmarks")
sys.argv[0] = "benchmarks/gpu.py"
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


def run(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-c", BARE, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_checks_and_measures_everything_it_can_reach(tmp_path):
    done = run("--device", "cpu", "--smoke", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    content = json.loads((tmp_path / "out.json").read_text())
    names = " ".join(check["name"] for check in content["checks"])
    for kernel in ("tree_attention", "accept_drawn", "path_move", "rope_write", "noise"):
        assert kernel in names
    for strategy in ("beam", "speculative", "likelihood", "rank"):
        assert f"strategy {strategy}" in names
    assert all(check["ok"] for check in content["checks"])
    assert all(row["ours_us"] > 0 for row in content["attention"] + content["kernels"])
    assert all(row["warm_ms"] > 0 for row in content["engine"])
    assert sum("recorded steps" in check["name"] for check in content["checks"]) == 18
    assert {row["recorded"] for row in content["text"]} == {False, True}
    assert all(row["step_ms"] > 0 for row in content["text"])


def test_a_wrong_kernel_is_a_failed_check(tmp_path):
    """The same run with an attention that forgets its scale exits 1 and names it."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from recserve.kernels import dispatch\n"
        "plain = dispatch.tree_attention\n"
        "def broken(batch, *rest):\n"
        "    attention = plain(batch, *rest)\n"
        "    return lambda query, *others: attention(query * 1.1, *others)\n"
        "dispatch.tree_attention = broken\n"
        "from gpu_checks import kernel_checks\n"
        "failed = [c.name for c in kernel_checks('cpu', smoke=True) if not c.ok]\n"
        "assert failed and all('tree_attention' in name for name in failed), failed\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], check=True, env=environment, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_says_so_where_there_is_no_gpu():
    done = run()
    assert done.returncode == 2 and "no CUDA device" in done.stderr
