"""Sums with norms, gates, and norms of heads: Triton, interpreted, against torch."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from recserve.engine.runner import Runner
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.layers import operators, reference, triton_norms, triton_rope_write
from recserve.kernels.layers.reference import HeadNorms
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.adapters import DecoderAdapter
from recserve.models.config import DecoderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from tests.support import triton_interpreter

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: {}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}
CLOSE[torch.bfloat16] = {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", [(1, 5), (7, 64), (3, 1100), (0, 8)])
def test_sum_and_norm(rows, size, dtype):
    g = torch.Generator().manual_seed(rows)
    x, y = (5 * torch.randn(2, rows, size, generator=g)).to(dtype)
    weight = torch.randn(size, generator=g).to(dtype)
    total, normed = triton_norms.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, F.rms_norm(x + y, (size,), weight, 1e-5), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (7, 128), (2, 3, 2500), (0, 8)])
def test_gate(shape, dtype):
    gate_up = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    got = triton_norms.silu_mul(gate_up)
    assert got.dtype == dtype
    torch.testing.assert_close(got, F.silu(gate) * up, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "rows,heads,kv_heads,dim", [(1, 1, 1, 2), (7, 6, 2, 80), (5, 3, 3, 96), (9, 4, 2, 64)]
)
def test_norms_of_heads(rows, heads, kv_heads, dim, dtype):
    """Queries and keys are normalised before they turn; values are copied."""
    g = torch.Generator().manual_seed(rows)
    qkv = (3 * torch.randn(rows, heads + 2 * kv_heads, dim, generator=g)).to(dtype)
    norms = HeadNorms(*(1 + torch.rand(2, dim, generator=g)).to(dtype), 1e-4)
    angles = torch.randn(rows, dim // 2, generator=g) * 100
    turns = angles.cos(), angles.sin()
    slots = torch.randperm(rows + 4, generator=g)[:rows]
    pools = [torch.full((2, rows + 4, kv_heads, dim), 5.0, dtype=dtype) for _ in range(3)]
    got = triton_rope_write.rope_write(qkv, *turns, slots, *pools[0], norms)
    twin = reference.rope_write(qkv, *turns, slots, *pools[1], norms)
    query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    query = F.rms_norm(query, (dim,), norms.query, norms.eps)
    key = F.rms_norm(key, (dim,), norms.key, norms.eps)
    whole = torch.cat([query, key, value], dim=1)
    apart = reference.rope_write(whole, *turns, slots, *pools[2])
    close = {"rtol": 4e-3, "atol": 4e-3} if dtype == torch.float16 else {}
    for one, pool in ((got, pools[0]), (twin, pools[1])):
        torch.testing.assert_close(one, apart, **close)
        torch.testing.assert_close(pool, pools[2], **close)
    assert torch.equal(pools[0][1], pools[2][1])


def test_layers_with_fused_kernels_compute_the_same(monkeypatch, force_kernels):
    """A decoder with norms of heads, through the pool: states, taps' ranges, keys and values."""
    torch.manual_seed(0)
    config = DecoderConfig(32, 3, 4, 2, 8, 48, qk_norm=True)
    model = LanguageModel(LanguageModelConfig(config, 40)).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = 1 + torch.rand_like(weight)
    tokens = torch.arange(9)
    found = {}
    launches, launch = Counter(), triton_interpreter.interpreter.GridExecutor.__call__

    def counted(self, *arguments, **options):
        launches[self.fn.__name__] += 1
        return launch(self, *arguments, **options)

    monkeypatch.setattr(triton_interpreter.interpreter.GridExecutor, "__call__", counted)
    for kernels in ("torch", "triton"):
        force_kernels(kernels)
        adapter = DecoderAdapter(model)
        pool = KVPool(adapter.kv_shape, 2, 16, torch.float32, torch.device("cpu"))
        slots, prefixes = torch.arange(9) + 3, Prefixes.of([torch.arange(0)])
        piece = TreeBatch(
            chain(tokens), None, slots, prefixes, inputs=NodeInputs(tokens), num_states=2
        )
        with torch.inference_mode():
            found[kernels] = Runner(adapter, pool).forward([piece])[0], pool.keys, pool.values
    for one, other in zip(found["torch"], found["triton"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert launches == {
        "rope_kernel": 3, "_attend": 3, "add_norm_kernel": 2 * 3, "gate_kernel": 3,
    }  # fmt: skip


def test_training_keeps_its_gradients(force_kernels):
    force_kernels("triton")
    x = torch.randn(2, 6, requires_grad=True)
    total, normed = operators.add_rms_norm(x, x, torch.ones(6), 1e-5)
    (operators.silu_mul(x).sum() + total.sum() + normed.sum()).backward()
    assert x.grad is not None
