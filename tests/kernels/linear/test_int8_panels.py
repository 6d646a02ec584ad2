"""8-bit products in C: those of the torch reference, and bits that depend on the row alone."""

import pytest
import torch

from recserve.kernels.linear import int8
from recserve.kernels.linear.int8 import Int8Weight
from recserve.kernels.linear.panels import Panels
from recserve.kernels.linear.products import DecodedProduct
from recserve.kernels.native import native

TYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "inner,outer", [(1, 1), (3, 64), (64, 63), (129, 65), (384, 1280), (2817, 200)]
)
def test_products_of_any_number_of_rows(inner, outer, dtype):
    weight, bias = Int8Weight.of(drawn(outer, inner)), drawn(outer, seed=1)
    panels = int8.panels(weight, bias, dtype)
    x = drawn(300, inner, seed=2).to(dtype)
    whole = panels(x)
    assert whole.dtype == dtype and whole.shape == (300, outer)
    exact = x.double() @ (weight.values.double() * weight.scales.double()[:, None]).T + bias
    # Sums are in float32 for both types, and the result is rounded once.
    eps = torch.finfo(dtype).eps
    rough = 64 * torch.finfo(torch.float32).eps * inner**0.5
    torch.testing.assert_close(whole.double(), exact, rtol=eps, atol=rough)
    reference = DecodedProduct(weight, bias.to(dtype), Int8Weight.dequantize)(x)
    torch.testing.assert_close(
        whole.double(), reference.double(), rtol=4 * eps, atol=64 * eps * max(inner**0.5, 8)
    )
    # Few rows, tiles of six, and the sizes from which weights are widened or blocks begin.
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 23, 24, 95, 96, 97, 192):
        assert torch.equal(panels(x[:count]), whole[:count]), count
    assert torch.equal(panels(x.view(2, 150, inner)), whole.view(2, 150, outer))


def test_what_does_not_fit_is_refused():
    panels = int8.panels(Int8Weight.of(drawn(5, 8)), None, torch.float32)
    for x in (torch.zeros(1, 9), torch.zeros(1, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"expected torch.float32 \[\.\.\., 8\]"):
            panels(x)
    assert int8.INT8.c_supports(torch.zeros(2, 3))
    assert not int8.INT8.c_supports(torch.zeros(2, 3, dtype=torch.float16))
    assert not int8.INT8.c_supports(torch.zeros(2, 3, device="meta"))


@pytest.mark.parametrize("dtype", TYPES)
def test_threads_change_no_bit(dtype):
    panels = int8.panels(Int8Weight.of(drawn(1000, 512)), None, dtype)
    x, before, found = drawn(100, 512, seed=1).to(dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(panels(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_the_panels_take_a_quarter_of_float32():
    weight = drawn(640, 256)
    packed = Panels.of(weight, None)
    for dtype in TYPES:
        panels = int8.panels(Int8Weight.of(weight), None, dtype)
        assert 4 * panels.weight.nbytes == packed.weight.nbytes
