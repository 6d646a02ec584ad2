"""Products with packed weights in C."""

import pytest
import torch

from recserve.kernels.linear.panels import Panels
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
@pytest.mark.parametrize("inner,outer", [(2, 1), (64, 63), (130, 65), (384, 1280), (2816, 200)])
def test_products_of_any_number_of_rows(inner, outer, dtype):
    weight, bias = rows(outer, inner, dtype), rows(1, outer, torch.float32, 1)[0]
    x = rows(150, inner, dtype, 2)
    packed = Panels.of(weight, bias)
    whole = packed(x)
    exact = x.double() @ weight.double().T + bias
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(whole.double(), exact, rtol=eps, atol=64 * eps * inner**0.5)
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 13, 64):
        assert torch.equal(packed(x[:count]), whole[:count]), count
    with pytest.raises(ValueError, match=f"expected .*\\[\\.\\.\\., {inner}\\]"):
        packed(rows(1, inner + 2, dtype))
