"""All layers of a decoder in one call of C."""

import pytest
import torch

from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.decoder.decoder import LayerShape, LayerWeights, NativeLayers
from recserve.kernels.layers import native as layers_native
from recserve.kernels.linear.panels import Panels
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
@pytest.mark.parametrize("dim", [32, 96, 288, 384, 448])
def test_a_layer_in_one_call_has_the_bits_of_its_operators(dim, dtype):
    """The scale of the scores, dim^-1/2, is rounded alike at every head size."""
    heads, kv_heads, size, inner = 2, 1, 64, 96
    batch, _, keys, values = draw_batch([("tree", 20)], [40], heads, kv_heads, dim)
    count, width = 20, (heads + 2 * kv_heads) * dim
    pools = [(keys.to(dtype), values.to(dtype)) for _ in range(2)]
    norms = rows(2, size, dtype, 1)
    shapes = ((width, size), (size, heads * dim), (2 * inner, size), (size, inner))
    weights = [Panels.of(rows(n, m, dtype, seed, 0.5), None) for seed, (n, m) in enumerate(shapes)]
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
