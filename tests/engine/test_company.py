"""The bits of a result do not depend on its company: rows of a product, and texts of a step."""

import copy

import numpy as np
import pytest
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.linear import products
from recserve.kernels.linear.formats import FORMATS
from recserve.kernels.native import native
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import PackedLinear, pack_weights, packable
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.grids import chosen

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 300

pytestmark = pytest.mark.skipif(
    not packable(torch.empty(1, 1)), reason="this torch has no oneDNN: nothing is ever packed"
)


@pytest.fixture(params=["auto", pytest.param("torch", marks=pytest.mark.slow)])
def kernels(request, force_kernels):
    """Products in C where there is a compiler, and oneDNN's."""
    force_kernels(request.param)
    return request.param


def served_formats(weight: torch.Tensor) -> list[str | None]:
    """Returns the formats in which the engine can serve a weight on this machine."""
    exact = [name for name, one in FORMATS.items() if one.exact]
    return [None, *(n for n in FORMATS if n not in exact or products.runs_in_c(weight, n))]


def shapes_of_models(seed: int, largest: int) -> list[tuple[int, int]]:
    """Returns (inputs, outputs) of products of drawn decoders, and of those that once differed."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(3):
        hidden = int(draw.integers(3, largest // 64 + 1)) * 64
        wide = hidden * 11 // 4
        outputs = int(draw.integers(1, largest + 1))
        shapes = [(hidden, outputs), (wide, min(hidden, 512)), (hidden, min(wide, 768)), (63, 65)]
        found.append(shapes[draw.integers(4)])
    return [*found, (2048, 192), (2816, 256), (1, 1)]


def assert_rows_alike(product: PackedLinear, x: torch.Tensor, draw: np.random.Generator) -> None:
    """Compares rows alone, among fewer others and in another order with those of all rows."""
    whole = product(x)
    for count in [1, 2, *draw.integers(3, ROWS, 10).tolist()]:
        start = int(draw.integers(0, ROWS - count + 1))
        part = slice(start, start + count)
        assert torch.equal(product(x[part]), whole[part]), (product.shape, count)
    assert torch.equal(product(x[7]), whole[7])
    order = torch.from_numpy(draw.permutation(ROWS))
    assert torch.equal(product(x[order]), whole[order]), product.shape


def check_products(seed: int, largest: int) -> None:
    draw = np.random.default_rng(seed)
    random = torch.Generator().manual_seed(seed)
    for inputs, outputs in shapes_of_models(seed, largest):
        for dtype in DTYPES:
            weight = torch.randn(outputs, inputs, generator=random).half().to(dtype)
            bias = torch.randn(outputs, generator=random).to(dtype)
            x = torch.randn(ROWS, inputs, generator=random).to(dtype)
            for stored in served_formats(weight):
                assert_rows_alike(PackedLinear(weight, bias, stored), x, draw)


@torch.inference_mode()
def test_a_row_of_a_product_has_the_same_bits_in_any_company(kernels):
    check_products(seed=1, largest=1024)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("seed", range(6))
def test_a_row_of_a_large_product_has_the_same_bits_in_any_company(kernels, seed):
    check_products(seed, largest=4096)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """A decoder of 1,024 x 2, whose sums are as long as those of small served models."""
    torch.manual_seed(0)
    decoder = DecoderConfig(1024, 2, 8, 4, 128, 2816, max_positions=64)
    return LanguageModel(LanguageModelConfig(decoder, 300)).requires_grad_(False).eval()


@pytest.mark.parametrize("dtype", chosen(DTYPES, "float32"))
def test_a_text_has_the_same_bits_alone_and_among_five(model, dtype, kernels):
    """In every type that `dtype: auto` can choose. Without C the invariant mode promises it."""
    served = copy.deepcopy(model).to(dtype)
    pack_weights(served)
    in_c = kernels == "auto" and native.library() is not None
    config = EngineConfig(kv_bytes=2**24, invariant=not in_c)
    draw = np.random.default_rng(3)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, logprobs=5)
    texts = [TextQuery(draw.integers(0, 300, size), params) for size in (1, 3, 9, 14, 33)]

    def write(together: list[TextQuery]) -> list[tuple[list[int], list[float]]]:
        answers = build_engine(EngineModels(text=served), config).run_many(together)
        return [(a.tokens.tolist(), [r.top_values for r in a.logprobs]) for a in answers]

    assert write(texts) == [write([text])[0] for text in texts]
