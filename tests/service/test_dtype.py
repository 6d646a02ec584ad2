"""The type a model computes in: as told, the fastest, or the folder's own where none is lost."""

import logging

import pytest
import torch

from recserve.kernels.linear import products
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.saving import save_language_model
from recserve.service import memory, model_loader
from recserve.service.memory import ModelSize
from recserve.service.text import loader
from recserve.service.text.loader import TextSettings

CPU = torch.device("cpu")
DECODER = DecoderConfig(32, 2, 4, 2, 8, 64, max_positions=64)


def prefer(monkeypatch, fastest: torch.dtype) -> None:
    """A machine where C has an instruction for bfloat16 products, or without one."""
    halves = fastest == torch.bfloat16
    monkeypatch.setattr(products.processor, "has_bfloat16_products", lambda: halves)
    monkeypatch.setattr(products.backend, "FORCED", "auto")
    monkeypatch.setattr(products, "library", lambda: object())


@pytest.fixture
def folder(tmp_path):
    def save(dtype: torch.dtype):
        torch.manual_seed(0)
        model = LanguageModel(LanguageModelConfig(DECODER, 40)).to(dtype)
        save_language_model(model, tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.mark.parametrize("fastest", [torch.float32, torch.bfloat16])
def test_auto_is_the_fastest_type(monkeypatch, folder, fastest, caplog):
    prefer(monkeypatch, fastest)
    with caplog.at_level(logging.INFO, logger="recserve"):
        assert model_loader.resolve_dtype("auto", CPU) == fastest
    assert f"{str(fastest)[6:]} is the fastest" in caplog.text
    for stored in (torch.float32, torch.bfloat16):
        settings = TextSettings(folder(stored), dtype="auto")
        assert loader._dtype(settings, CPU) == fastest


def test_a_named_type_is_taken_whatever_is_faster(monkeypatch, folder):
    prefer(monkeypatch, torch.bfloat16)
    assert model_loader.resolve_dtype("float32", CPU) == torch.float32
    assert loader._dtype(TextSettings(folder(torch.bfloat16), dtype="float32"), CPU) == (
        torch.float32
    )


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_halves_compute_in_float32_where_that_is_faster(monkeypatch, folder, stored):
    """Every half-precision weight is a float32 number, so nothing is rounded."""
    settings = TextSettings(folder(stored))
    prefer(monkeypatch, torch.float32)
    assert loader._dtype(settings, CPU) == torch.float32
    prefer(monkeypatch, torch.bfloat16)  # no processor multiplies float16 with C
    fastest = torch.bfloat16 if stored == torch.bfloat16 else torch.float32
    assert loader._dtype(settings, CPU) == fastest


def test_float32_weights_are_not_rounded_unless_asked(monkeypatch, folder):
    prefer(monkeypatch, torch.bfloat16)
    assert loader._dtype(TextSettings(folder(torch.float32)), CPU) == torch.float32


def free(monkeypatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: num_bytes)
    monkeypatch.setattr(loader, "available_bytes", lambda device: num_bytes)


@pytest.mark.parametrize("free_bytes", [None, 445_000, 444_000, 223_000])
def test_auto_takes_the_smaller_type_where_the_larger_does_not_fit(monkeypatch, free_bytes, caplog):
    """100,000 weights take 400 kB in float32, and may take nine tenths of the free memory."""
    prefer(monkeypatch, torch.float32)
    free(monkeypatch, free_bytes)
    fits = free_bytes is None or free_bytes >= 444_445
    with caplog.at_level(logging.INFO, logger="recserve"):
        found = model_loader.resolve_dtype("auto", CPU, ModelSize(100_000))
    assert found == (torch.float32 if fits else torch.bfloat16)
    assert ("do not fit" in caplog.text) == (not fits)
    # Weights that are loaded already free their memory while they are converted.
    loaded = ModelSize(100_000, loaded_bytes=400_000)
    assert model_loader.resolve_dtype("auto", CPU, loaded) == torch.float32


def test_auto_takes_the_faster_type_although_the_larger_fits(monkeypatch):
    prefer(monkeypatch, torch.bfloat16)
    free(monkeypatch, 10**9)
    size = ModelSize(100_000)
    assert model_loader.resolve_dtype("auto", CPU, size) == torch.bfloat16


def test_a_model_that_fits_in_no_type_is_refused_with_sizes(monkeypatch):
    prefer(monkeypatch, torch.float32)
    free(monkeypatch, 8_000_000_000)
    size = ModelSize(7_000_000_000)
    with pytest.raises(ValueError, match=r"14\.0 GB in bfloat16, .* 8\.0 GB .* `weights: int8`"):
        model_loader.resolve_dtype("auto", CPU, size)
    assert model_loader.resolve_dtype("bfloat16", CPU, size) == torch.bfloat16
    # The matrices will take half of that, so the attempt is the operator's choice.
    int8 = ModelSize(7_000_000_000, weights="int8")
    assert model_loader.resolve_dtype("auto", CPU, int8) == torch.bfloat16


@pytest.mark.parametrize("native", [True, False])
def test_memory_of_a_gpu_decides_too(monkeypatch, native):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 900))
    cuda = torch.device("cuda")
    for weights, expected in ((60, torch.float32), (130, torch.bfloat16)):
        expected = torch.bfloat16 if native else expected
        assert model_loader.resolve_dtype(None, cuda, ModelSize(weights)) == expected
    with pytest.raises(ValueError, match="dtype auto"):
        model_loader.resolve_dtype("auto", cuda, ModelSize(140))


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_is_judged_by_the_weights_that_it_will_hold(monkeypatch, tmp_path, tied):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(DECODER, 40, tied=tied)).bfloat16()
    save_language_model(model, tmp_path)
    prefer(monkeypatch, torch.float32)
    # The head is packed beside the embedding, so both count in both models.
    count = sum(p.numel() for p in model.parameters()) + (40 * 32 if tied else 0)
    for dtype in ("auto", None):
        settings = TextSettings(tmp_path, dtype=dtype)
        free(monkeypatch, int(4 * count / 0.9) + 1)
        assert loader._dtype(settings, CPU) == torch.float32
        free(monkeypatch, int(4 * count / 0.9) - 1)
        assert loader._dtype(settings, CPU) == torch.bfloat16
    free(monkeypatch, 2 * count)
    assert loader._dtype(TextSettings(tmp_path), CPU) == torch.bfloat16  # as stored, unchecked
    with pytest.raises(ValueError, match="dtype auto"):
        loader._dtype(TextSettings(tmp_path, dtype="auto"), CPU)
    int8 = TextSettings(tmp_path, dtype="auto", weights="int8")
    assert loader._dtype(int8, CPU) == torch.bfloat16
