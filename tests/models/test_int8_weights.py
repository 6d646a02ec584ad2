"""Models whose weights are stored in 8 bits: the network of the rounded weights, in every path."""

import copy
from dataclasses import replace

import pytest
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.kernels.linear.int8 import Int8Weight
from recserve.kernels.native import native
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import PackedLinear, pack_weights
from tests.support.invariant_texts import SIZES, long_sums, report, text_queries
from tests.support.recommenders import CATALOGUES, make
from tests.support.text_engines import assert_no_leak
from tests.support.text_plain import TableDrafter


@pytest.fixture(params=["c", "torch"])
def kernels(request, force_kernels):
    """Products in C where there is a compiler, and in torch."""
    force_kernels(request.param)
    return request.param


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy whose linear weights are those of 8 bits, in the model's type."""
    model = copy.deepcopy(model)
    for linear in model.modules():
        if isinstance(linear, torch.nn.Linear):
            linear.weight.copy_(Int8Weight.of(linear.weight).dequantize(linear.weight.dtype))
    return model


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_rounded_weights(tied, kernels):
    torch.manual_seed(0)
    shape = LanguageModelConfig(DecoderConfig(64, 3, 4, 2, 32, 96, attention_bias=True), 200, tied)
    model = LanguageModel(shape).requires_grad_(False).eval()
    expected = rounded(model)
    head = Int8Weight.of(model.tokens.weight).dequantize(torch.float32)
    pack_weights(model, "int8")
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    in_c = kernels == "c" and native.library() is not None
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 3 * 4 + 1
    assert all((layer.panels is not None) == in_c for layer in packed)
    assert (model.decoder.whole_decoder is not None) == in_c
    tokens, positions = torch.randint(0, 200, (1, 50)), torch.arange(50)[None]
    with torch.inference_mode():
        hidden = expected(tokens, positions, DenseAttention())
        wanted = torch.nn.functional.linear(hidden, head) if tied else expected.logits(hidden)
        got = model.logits(model(tokens, positions, DenseAttention()))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    # The rounding itself is visible, so the test compares with the right weights.
    assert (head - model.tokens.weight).abs().max() > 1e-5


@pytest.mark.skipif(native.library() is None, reason="the sums of torch depend on the rows")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_has_the_same_bits_alone_together_and_drafted(dtype, force_kernels):
    """In the invariant mode, whose test at the start covers these weights too."""
    force_kernels("c")
    model = long_sums(dtype)
    pack_weights(model, "int8")
    alone = [
        report(build_engine(EngineModels(text=model), SIZES), [query])[0]
        for query in text_queries()
    ]
    texts = {tuple(q.prompt.tolist()): t for q, (t, _) in zip(text_queries(), alone, strict=True)}
    for kind in ("tree", "mixed"):
        models = EngineModels(text=model, drafters={"t": TableDrafter(kind, texts)})
        engine = build_engine(models, SIZES)
        assert report(engine, text_queries("t")) == alone, kind
        assert_no_leak(engine)


@torch.no_grad()
def test_a_recommender_keeps_its_codes_and_packs_its_decoder(kernels):
    model, _ = make(CATALOGUES["ordinary"], "codes", "children")
    expected = rounded(model.decoder)
    codes = model.level_codes(0).clone()
    pack_weights(model.decoder, "int8")
    model.pack()
    in_c = kernels == "c" and native.library() is not None
    layers = [m for m in model.decoder.modules() if isinstance(m, PackedLinear)]
    assert layers and all((layer.panels is not None) == in_c for layer in layers)
    assert torch.equal(model.level_codes(0), codes)
    with torch.inference_mode():
        tokens = torch.arange(1, 9)[None]
        positions = torch.arange(8)[None]
        wanted = expected(model.embed(tokens), positions, DenseAttention())
        got = model(tokens, positions, DenseAttention())
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(native.library() is None, reason="no C compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_in_one_call_give_the_bits_of_one_by_one(dtype, force_kernels):
    force_kernels("c")
    torch.manual_seed(0)
    decoder = DecoderConfig(64, 2, 4, 2, 32, 96, max_positions=64)
    model = LanguageModel(LanguageModelConfig(decoder, 40)).requires_grad_(False).eval().to(dtype)
    model.tokens.weight.mul_(30)
    pack_weights(model, "int8")
    together = model.decoder.whole_decoder
    assert together is not None
    size = replace(SIZES, invariant=False)
    found = report(build_engine(EngineModels(text=model), size), text_queries())
    model.decoder.whole_decoder = None
    assert report(build_engine(EngineModels(text=model), size), text_queries()) == found
