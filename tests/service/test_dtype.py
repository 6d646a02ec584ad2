"""The type a model computes in: as told, the fastest, or the folder's own where none is lost."""

import logging

import pytest
import torch

from recserve.models import packing
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.saving import save_language_model
from recserve.service import model_loader
from recserve.service.text import loader
from recserve.service.text.loader import TextSettings

CPU = torch.device("cpu")
DECODER = DecoderConfig(32, 2, 4, 2, 8, 64, max_positions=64)


def prefer(monkeypatch, fastest: torch.dtype) -> None:
    """A machine on which one type is ten times as fast as all others."""
    monkeypatch.setattr(
        packing.dispatch, "products_ms", lambda shapes, dtype: (1.0 if dtype == fastest else 10.0,)
    )


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
        assert model_loader.resolve_dtype("auto", DECODER, CPU) == fastest
    assert f"{str(fastest)[6:]} is the fastest" in caplog.text
    for stored in (torch.float32, torch.bfloat16):
        settings = TextSettings(folder(stored), dtype="auto")
        assert loader._dtype(settings, CPU) == fastest


def test_a_named_type_is_taken_whatever_is_faster(monkeypatch, folder):
    prefer(monkeypatch, torch.bfloat16)
    assert model_loader.resolve_dtype("float32", DECODER, CPU) == torch.float32
    assert loader._dtype(TextSettings(folder(torch.bfloat16), dtype="float32"), CPU) == (
        torch.float32
    )


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_halves_compute_in_float32_where_that_is_faster(monkeypatch, folder, stored):
    """Every half-precision weight is a float32 number, so nothing is rounded."""
    settings = TextSettings(folder(stored))
    prefer(monkeypatch, torch.float32)
    assert loader._dtype(settings, CPU) == torch.float32
    prefer(monkeypatch, stored)
    assert loader._dtype(settings, CPU) == stored


def test_float32_weights_are_not_rounded_unless_asked(monkeypatch, folder):
    prefer(monkeypatch, torch.bfloat16)
    assert loader._dtype(TextSettings(folder(torch.float32)), CPU) == torch.float32
