"""Ahead of time, without a GPU: every kernel and form becomes machine code that fits the target."""

import os
import subprocess
import sys

import pytest

from tests.support import triton_interpreter  # noqa: F401
from tests.support.paths import ROOT


def compiled(folder, *arguments: str) -> int:
    """How many kernels became machine code, in a process of their own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "triton")
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, "tests/support/compile_kernels.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.count("compiled")


@pytest.mark.slow
def test_a_few_compile_to_machine_code(tmp_path):
    """Attention over FP8, one acceptance kernel and the search of children."""
    assert compiled(tmp_path, "90", "--few") == 3


@pytest.mark.slow
@pytest.mark.parametrize("capability,kernels", [(80, 22), (90, 80)])
def test_all_compile_to_machine_code(capability, kernels, tmp_path):
    assert compiled(tmp_path, str(capability)) == kernels
