"""Weights in 8 bits: the rounding, and the product that every machine has."""

import pytest
import torch
import torch.nn.functional as F

from recserve.kernels.linear.int8 import LARGEST, Int8Weight
from recserve.kernels.linear.products import DecodedProduct


def drawn(size: int, inner: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(size)
    return (torch.randn(size, inner, generator=g) * torch.logspace(-3, 3, size)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size,inner", [(1, 1), (63, 65), (7, 1000)])
def test_a_weight_is_off_by_at_most_half_a_step_of_its_row(size, inner, dtype):
    weight = drawn(size, inner, dtype)
    rounded = Int8Weight.of(weight)
    assert rounded.values.dtype == torch.int8 and rounded.scales.dtype == torch.float32
    assert rounded.values.abs().amax(1).tolist() == [LARGEST] * size
    off = (rounded.values.double() * rounded.scales.double()[:, None] - weight.double()).abs()
    assert (off <= rounded.scales.double()[:, None] * (0.5 + 1e-4)).all()


def test_a_row_is_rounded_by_itself_and_zeros_stay_zeros():
    weight = drawn(9, 40)
    weight[4] = 0
    rounded = Int8Weight.of(weight)
    for row in range(9):
        one = Int8Weight.of(weight[row : row + 1])
        assert torch.equal(one.values[0], rounded.values[row])
        assert torch.equal(one.scales[0], rounded.scales[row])
    assert not rounded.values[4].any() and rounded.scales[4] == 0
    assert torch.equal(rounded.dequantize(torch.float32)[4], weight[4])
    # The rounding is symmetric, and a weight that is on the grid does not change.
    assert torch.equal(Int8Weight.of(-weight).values, -rounded.values)
    again = Int8Weight.of(rounded.dequantize(torch.float32))
    assert torch.equal(again.values, rounded.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_product_is_that_of_the_rounded_weight(dtype):
    weight = Int8Weight.of(torch.randn(30, 50, generator=torch.Generator().manual_seed(1)))
    bias = torch.linspace(-1, 1, 30).to(dtype)
    x = torch.randn(2, 5, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = DecodedProduct(weight, bias, Int8Weight.dequantize)(x)
    assert got.dtype == dtype and got.shape == (2, 5, 30)
    exact = F.linear(x.double(), weight.values.double() * weight.scales[:, None], bias.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, atol=32 * eps, rtol=4 * eps)
