"""Packed weights: the products of the plain ones. tests/engine/test_company.py has the bits."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recserve.engine.build import EngineModels, build_engine
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import PackedLinear, pack_weights, packable
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.text_plain import drawn_model

pytestmark = pytest.mark.skipif(
    not packable(torch.empty(1, 1)), reason="this torch has no oneDNN: nothing is ever packed"
)
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["auto", "torch"], autouse=True)
def kernels(request, force_kernels):
    """Products in C where there is a compiler, and oneDNN's."""
    force_kernels(request.param)


def skip_unless_packable(dtype: torch.dtype) -> None:
    if not packable(torch.empty(1, 1, dtype=dtype)):
        pytest.skip(f"this processor has no packed products of {dtype}")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inner,outer", [(1, 1), (63, 65), (384, 1280), (1024, 3000)])
def test_products(inner, outer, dtype):
    skip_unless_packable(dtype)
    g = torch.Generator().manual_seed(inner)
    weight = torch.randn(outer, inner, generator=g).to(dtype)
    bias = torch.randn(outer, generator=g).to(dtype)
    layer = PackedLinear(weight, bias)
    for shape in ((1, inner), (7, inner), (2, 5, inner), (0, inner)):
        x = torch.randn(shape, generator=g).to(dtype)
        exact = F.linear(x.double(), weight.double(), bias.double())
        got = layer(x)
        assert got.dtype == dtype and got.shape == exact.shape
        scale = max(inner**0.5, 8) * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), exact, atol=16 * scale, rtol=scale)


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_says_the_same(tied):
    torch.manual_seed(0)
    shape = LanguageModelConfig(DecoderConfig(64, 3, 4, 2, 16, 96, attention_bias=True), 200, tied)
    model = LanguageModel(shape).requires_grad_(False)
    packed = copy.deepcopy(model)
    pack_weights(packed)
    linear = [m for m in packed.modules() if isinstance(m, torch.nn.Linear)]
    assert not linear and isinstance(packed.head, PackedLinear)
    tokens, positions = torch.randint(0, 200, (1, 50)), torch.arange(50)[None]
    wanted = model.logits(model(tokens, positions, DenseAttention()))
    got = packed.logits(packed(tokens, positions, DenseAttention()))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_a_packed_model_writes_the_same_text():
    model = drawn_model(1)
    packed = copy.deepcopy(model)
    pack_weights(packed)
    request = TextQuery(np.array([3, 1, 4]), SamplingParams(temperature=0.0, max_tokens=30))
    texts = [
        build_engine(EngineModels(text=m)).run(request).tokens.tolist() for m in (model, packed)
    ]
    assert texts[0] == texts[1]
