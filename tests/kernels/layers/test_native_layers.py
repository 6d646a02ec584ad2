"""Norms, the gate, RoPE and whole layers in C against torch."""

import pytest
import torch
import torch.nn.functional as F
from recserve.kernels.layers.decoder import LayerShape, LayerWeights, NativeLayers

from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.layers import native as layers_native
from recserve.kernels.layers import reference as layers_reference
from recserve.kernels.linear import panels
from recserve.kernels.native import native
from tests.support.attention_batches import draw_batch

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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [32, 96, 288, 384, 448])
def test_a_layer_in_one_call_has_the_bits_of_its_operators(dim, dtype):
    """The scale of the scores, dim^-1/2, is rounded alike at every head size."""
    heads, kv_heads, size, inner = 2, 1, 64, 96
    batch, _, keys, values = draw_batch([("tree", 20)], [40], heads, kv_heads, dim)
    count, width = 20, (heads + 2 * kv_heads) * dim
    pools = [(keys.to(dtype), values.to(dtype)) for _ in range(2)]
    norms = rows(2, size, dtype, 1)
    shapes = ((width, size), (size, heads * dim), (2 * inner, size), (size, inner))
    weights = [
        panels.Panels.of(rows(n, m, dtype, seed, 0.5), None) for seed, (n, m) in enumerate(shapes)
    ]
    qkv, output, gate_up, down = weights
    layer = LayerWeights(norms[0], None, None, norms[1], *weights)
    attention = NativeTreeAttention(batch)
    x, angles = rows(count, size, dtype, 7), rows(count, dim // 2, torch.float32, 8)
    turns = angles.cos(), angles.sin()
    run = NativeLayers([layer], norms[0], LayerShape(size, heads, kv_heads, dim, inner, 1e-5))
    pool = tuple(side[None] for side in pools[0])
    whole = run(x, turns, batch.slots, pool, attention, range(1), False)

    normed = layers_native.rms_norm(x, norms[0], 1e-5)
    query = layers_native.rope_write(
        qkv(normed).view(count, -1, dim), *turns, batch.slots, pools[1][0], pools[1][1]
    )
    x = x + output(attention(query, query, query, *pools[1]).flatten(1))
    x = x + down(layers_native.silu_mul(gate_up(layers_native.rms_norm(x, norms[1], 1e-5))))
    assert torch.equal(whole, x)
    for one, two in zip(*pools, strict=True):
        assert torch.equal(one, two)
