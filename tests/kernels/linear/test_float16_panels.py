"""Products with float16 weights have the bits of the same weights in float32."""

import pytest
import torch

from recserve.kernels.linear import float16
from recserve.kernels.linear.panels import Panels
from recserve.kernels.native import native
from recserve.models.packing import PackedLinear, pack_weights

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def drawn(size: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight of float16 numbers as float32, from subnormal to large, and a bias."""
    g = torch.Generator().manual_seed(size)
    scales = 10.0 ** torch.randint(-8, 3, (size, 1), generator=g)
    weight = torch.randn(size, inner, generator=g) * scales
    weight[0, :2] = torch.tensor([-0.0, 65504.0])
    return weight.half().float(), torch.randn(size, generator=g)


@pytest.mark.parametrize("inner,size", [(2, 1), (63, 65), (256, 64), (513, 200)])
def test_products_have_the_bits_of_float32_weights(inner, size):
    weight, bias = drawn(size, inner)
    x = torch.randn(150, inner, generator=torch.Generator().manual_seed(1))
    assert float16.c_supports(weight)
    packed, wide = Panels.of(weight.half(), bias, torch.float32), Panels.of(weight, bias)
    assert packed.weight.dtype == torch.float16
    expected = wide(x)
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 23, 24, 150):
        assert torch.equal(packed(x[:rows]), expected[:rows]), rows
    exact = x.double() @ weight.double().T + bias
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-1)
    with pytest.raises(ValueError, match=f"expected torch.float32 .*{inner}"):
        packed(x.bfloat16())


@pytest.mark.parametrize("wrong", [0.1, 1e-9, 65536.0, float("inf"), float("nan")])
def test_weights_that_float16_rounds_are_not_stored_in_it(wrong, force_kernels):
    weight, _ = drawn(8, 16)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4, bias=False))
    layers[0].weight.copy_(weight)
    layers[1].weight.fill_(0.5)
    assert float16.c_supports(weight)
    weight[3, 5] = wrong
    assert not float16.c_supports(weight) and not float16.c_supports(weight.half())
    force_kernels("c")
    layers[1].weight[0, 0] = wrong
    pack_weights(layers, "float16")
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    assert packed and not any(layer.panels.weight.dtype == torch.float16 for layer in packed)
