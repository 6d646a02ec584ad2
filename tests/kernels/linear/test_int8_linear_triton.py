"""Products with weights in 8 bits: Triton, interpreted, against the rounded weight in torch."""

import pytest
import torch

from recserve.kernels.linear.int8 import Int8Weight
from recserve.kernels.linear.products import DecodedProduct
from recserve.kernels.linear.triton_int8 import MAX_ROWS, TritonInt8Product
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import PackedLinear, pack_weights
from tests.support import triton_interpreter  # noqa: F401

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}
CLOSE[torch.bfloat16] = {"rtol": 3e-2, "atol": 3e-2}


def drawn(dtype, size, inner, bias):
    g = torch.Generator().manual_seed(size)
    weight = torch.randn(size, inner, generator=g) * torch.logspace(-2, 0, size)[:, None]
    offsets = torch.randn(size, generator=g).to(dtype) if bias else None
    return Int8Weight.of(weight), offsets


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(
    "shape,size,bias",
    [((1, 5), 3, True), ((7, 130), 33, False), ((2, 9, 256), 64, True), ((0, 8), 4, True)],
)
def test_a_few_rows(shape, size, bias, dtype):
    weight, offsets = drawn(dtype, size, shape[-1], bias)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = TritonInt8Product(weight, offsets)(x)
    assert got.dtype == dtype and got.shape == (*shape[:-1], size)
    exact = torch.nn.functional.linear(
        x.double(), weight.values.double() * weight.scales[:, None],
        None if offsets is None else offsets.double(),
    )  # fmt: skip
    torch.testing.assert_close(got.double(), exact, **CLOSE[dtype])


def test_many_rows_are_those_of_the_reference():
    weight, offsets = drawn(torch.float32, 20, 48, True)
    x = torch.randn(MAX_ROWS + 1, 48, generator=torch.Generator().manual_seed(2))
    product = TritonInt8Product(weight, offsets)
    reference = DecodedProduct(weight, offsets, Int8Weight.dequantize)
    assert torch.equal(product(x), reference(x))
    torch.testing.assert_close(product(x[:MAX_ROWS]), reference(x)[:MAX_ROWS])


def test_a_model_on_a_gpu_reads_eight_bits(force_kernels):
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48, attention_bias=True)
    tokens, positions = torch.randint(0, 40, (1, 9)), torch.arange(9)[None]
    found = {}
    for kernels in ("torch", "triton"):
        force_kernels(kernels)
        torch.manual_seed(0)
        model = LanguageModel(LanguageModelConfig(decoder, 40)).eval().requires_grad_(False)
        pack_weights(model, "int8")
        kinds = {type(m._product) for m in model.modules() if isinstance(m, PackedLinear)}
        assert kinds == {DecodedProduct if kernels == "torch" else TritonInt8Product}
        with torch.inference_mode():
            found[kernels] = model.logits(model(tokens, positions, DenseAttention()))
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-4)
