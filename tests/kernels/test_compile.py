"""Ahead of time, without a GPU: every kernel and form becomes machine code that fits the target."""

import os
import subprocess
import sys

import pytest

from tests.support import triton_interpreter  # noqa: F401
from tests.support.paths import ROOT


@pytest.mark.parametrize("capability,kernels", [(80, 16), (90, 68)])
def test_compiles_to_machine_code(capability, kernels, tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.getbasetemp() / "triton")
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, "tests/support/compile_kernels.py", str(capability)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("compiled") == kernels, run.stdout
