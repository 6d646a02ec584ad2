"""A float32 model whose weights are float16 numbers: two bytes per weight, and the same texts."""

import copy
from dataclasses import replace

import pytest
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.kernels.native import native
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.loading import load_language_model
from recserve.models.packing import PackedLinear, pack_weights
from recserve.models.saving import save_language_model
from recserve.service.text import loader
from tests.support.invariant_texts import SIZES, report, text_queries

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


def halves_of(tied: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    decoder = DecoderConfig(64, 2, 4, 2, 32, 96, max_positions=64)
    model = LanguageModel(LanguageModelConfig(decoder, 40, tied)).requires_grad_(False).eval()
    model.tokens.weight.mul_(30)
    return model.half()


def stored_types(model: LanguageModel) -> set[torch.dtype]:
    packed = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    return {layer.panels.weight.dtype for layer in packed}


@pytest.mark.parametrize("tied,invariant", [(False, False), (True, True)])
def test_texts_and_scores_are_those_of_float32_weights(tied, invariant, force_kernels):
    force_kernels("c")
    wide = halves_of(tied).float()
    model = copy.deepcopy(wide)
    pack_weights(wide)
    pack_weights(model, "float16")
    assert (stored_types(wide), stored_types(model)) == ({torch.float32}, {torch.float16})
    assert model.decoder.whole_decoder is not None
    size = replace(SIZES, invariant=invariant)
    expected = report(build_engine(EngineModels(text=wide), size), text_queries())
    assert report(build_engine(EngineModels(text=model), size), text_queries()) == expected
    model.decoder.whole_decoder = None
    assert report(build_engine(EngineModels(text=model), size), text_queries()) == expected


def test_only_a_float16_folder_in_float32_is_packed_so(tmp_path, force_kernels):
    force_kernels("c")
    for stored in (torch.float16, torch.bfloat16, torch.float32):
        folder = tmp_path / str(stored)
        save_language_model(halves_of().to(stored), folder)
        for dtype in (stored, torch.float32):
            network = load_language_model(folder, dtype)
            exact = (stored, dtype) == (torch.float16, torch.float32)
            assert loader._exact_format(folder, network) == ("float16" if exact else None)
    folder = tmp_path / "torch.float16"
    network = load_language_model(folder, torch.float32)
    pack_weights(network, loader._exact_format(folder, network))
    assert stored_types(network) == {torch.float16}
