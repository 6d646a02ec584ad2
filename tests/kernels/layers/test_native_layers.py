"""Norms, the gate and RoPE in C against torch."""

import pytest
import torch
import torch.nn.functional as F

from recserve.kernels.layers import native as layers_native
from recserve.kernels.layers import reference as layers_reference
from recserve.kernels.native import native

TYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def rows(count, size, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, size, generator=g) * scale).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 1000])
def test_rows_are_those_of_torch_and_do_not_know_each_other(size, dtype):
    x, weight = rows(7, size, dtype), rows(1, size, dtype, 1)[0]
    near = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
    got = layers_native.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, F.rms_norm(x, (size,), weight, 1e-5), **near)
    assert torch.equal(layers_native.rms_norm(x[3:4], weight, 1e-5), got[3:4])

    both = rows(7, 2 * size, dtype, scale=6.0)
    got = layers_native.silu_mul(both)
    torch.testing.assert_close(got, F.silu(both[:, :size]) * both[:, size:], **near)
    assert torch.equal(layers_native.silu_mul(both[3:4]), got[3:4])
    assert torch.equal(layers_native.silu_mul(both.view(7, 1, -1)).flatten(1), got)


def test_the_gate_of_what_is_not_a_usual_number():
    gates = torch.tensor([200.0, -200.0, float("inf"), 0.0, -88.5, float("nan"), -87.5])
    got = layers_native.silu_mul(torch.cat([gates, torch.ones(7)])[None])[0]
    assert got[0] == 200 and got[2] == float("inf") and got[3] == 0 and got[5].isnan()
    assert (got[[1, 4, 6]].abs() < 1e-34).all()
    weights = torch.ones(7)
    assert layers_native.rms_norm(gates[None], weights, 1e-5).isnan().any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 64), (1, 1, 32), (7, 1, 128)])
def test_rope_is_written_where_the_reference_writes_it(heads, kv_heads, dim, dtype):
    g = torch.Generator().manual_seed(3)
    qkv = torch.randn(9, heads + 2 * kv_heads, dim, generator=g).to(dtype)
    angles = torch.randn(9, dim // 2, generator=g)
    slots = torch.randperm(30, generator=g)[:9]
    pools = torch.full((2, 2, 30, kv_heads, dim), float("nan"), dtype=dtype)
    both = [
        way(qkv, angles.cos(), angles.sin(), slots, pool[0], pool[1])
        for way, pool in (
            (layers_reference.rope_write, pools[0]),
            (layers_native.rope_write, pools[1]),
        )
    ]
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 4e-3}
    torch.testing.assert_close(both[1], both[0], **near)
    torch.testing.assert_close(pools[1], pools[0], equal_nan=True, **near)
    assert torch.equal(pools[1, 1].nan_to_num(9.0), pools[0, 1].nan_to_num(9.0))
