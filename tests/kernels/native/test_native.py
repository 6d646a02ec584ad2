"""Threads of the C functions, and what happens without them."""

import subprocess
import sys

import pytest
import torch

from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.layers import native as layers_native
from recserve.kernels.linear.panels import Panels
from recserve.kernels.native import native
from tests.support.attention_batches import draw_batch

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def rows(count, size, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, size, generator=g) * scale).to(dtype)


def test_threads_change_no_bit():
    x, weight = rows(9, 512, torch.bfloat16), rows(1000, 512, torch.bfloat16, 1)
    packed = Panels.of(weight, None)
    batch, query, keys, values = draw_batch([("tree", 40)] * 3, [200, 0, 90], 8, 4, 32)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            attend = NativeTreeAttention(batch)
            out = attend(query, query, query, keys, values)
            found.append((packed(x), out, layers_native.silu_mul(x)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


WITHOUT = """
import torch
from recserve.kernels.layers import operators
from recserve.kernels.linear import products
from recserve.kernels.native import native
x = torch.arange(32.0)[None]
with torch.inference_mode():
    print(native.library() is None, products.runs_in_c(torch.zeros(4, 4)))
    print(operators.silu_mul(x).sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_does_the_same(compiler, tmp_path):
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={"CC": compiler, "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert said[:2] == ["True", "False"]
    x = torch.arange(32.0)[None]
    with torch.inference_mode():
        assert float(said[2]) == pytest.approx(layers_native.silu_mul(x).sum().item(), rel=1e-6)
    assert not list(tmp_path.rglob("*.so"))


def test_gradients_take_torchs_way(force_kernels):
    force_kernels("c")
    x = torch.ones(1, 32)
    assert backend_of(x) is Backend.C
    with torch.inference_mode(False), torch.enable_grad():
        assert backend_of(x) is not Backend.C
