"""What operators read about kernels: each product and the attention, with the reason."""

import pytest
import torch

from recserve.doctor.kernel_report import kernels_in_use
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.native import native
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import pack_weights
from recserve.service.text.loader import TextSettings, load_text
from tests.support.paths import reference
from tests.support.rankers import make_ranker

CPU = torch.device("cpu")
SHAPES = {"[128, 32]", "[32, 64]", "[96, 32]", "[32, 48]", "[40, 32]"}


def small(dtype: torch.dtype = torch.float32, head_dim: int = 16) -> LanguageModel:
    torch.manual_seed(0)
    decoder = DecoderConfig(32, 2, 4, 2, head_dim, 48, max_positions=64)
    return LanguageModel(LanguageModelConfig(decoder, 40)).requires_grad_(False).eval().to(dtype)


def report(model: LanguageModel, config: EngineConfig | None = None) -> dict[str, str]:
    (found,) = kernels_in_use(build_engine(EngineModels(text=model), config)).values()
    return found


@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_a_forced_choice_is_named_for_every_shape(kernels, stored, force_kernels):
    force_kernels(kernels)
    model = small()
    pack_weights(model, stored)
    found = report(model)
    attention = found.pop("attention")
    in_c = kernels == "c" and native.library() is not None
    reason = "RECSERVE_KERNELS is torch"
    if kernels == "c":
        reason = "no compiled C kernels and no C compiler"
    said = "C" if in_c else f"torch: {reason}"
    assert attention == said
    if stored is None and "torch: not packed" in found.values():
        pytest.skip("this torch has no oneDNN")
    wanted = "float32" if stored is None else "int8 x float32"
    layers = {f"2 products {shape} {wanted}" for shape in SHAPES - {"[40, 32]"}}
    assert set(found) == layers | {f"1 products [40, 32] {wanted}"}
    assert set(found.values()) == {said}


def test_what_c_does_not_compute_is_said(force_kernels):
    force_kernels("c")
    plain = report(small())
    assert {kernel for work, kernel in plain.items() if work != "attention"} == {
        "torch: not packed"
    }
    odd = report(small(head_dim=8))
    assert odd["attention"].startswith("torch: ")
    (ranker,) = kernels_in_use(build_engine(EngineModels(ranker=make_ranker()))).values()
    assert (ranker["attention"] == "C") == (native.library() is not None)


def test_the_setting_reaches_the_weights():
    for weights, name in ((None, "float32"), ("int8", "int8 x float32")):
        settings = TextSettings(reference("stories260k"), weights=weights)
        found = report(load_text(settings, CPU).network)
        assert all(work.endswith(f"] {name}") for work in found if work != "attention")
