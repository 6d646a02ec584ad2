"""The table of formats: one line makes a format known to settings, commands, models and reports."""

import pytest
import torch
from typer.testing import CliRunner

from recserve.cli.app import app
from recserve.config import ServerConfig
from recserve.doctor.kernel_report import kernels_in_use
from recserve.engine.build import EngineModels, build_engine
from recserve.kernels import backend
from recserve.kernels.linear.formats import FORMATS, check_format
from recserve.kernels.native import native
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import PackedLinear, pack_weights
from recserve.service import memory
from tests.support.four_bits import FOUR_BITS, decode, encode


@pytest.fixture
def four_bits(monkeypatch):
    monkeypatch.setitem(FORMATS, "four", FOUR_BITS)


def drawn() -> LanguageModel:
    torch.manual_seed(0)
    decoder = DecoderConfig(32, 2, 4, 2, 16, 48, max_positions=64)
    return LanguageModel(LanguageModelConfig(decoder, 40)).requires_grad_(False).eval()


def test_every_format_encodes_and_decodes():
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).half().float()
    for name, one in FORMATS.items():
        codec = one.open()
        decoded = codec.decode(codec.encode(weight), torch.float32)
        error = (decoded - weight).abs().max() / weight.abs().max()
        assert error == 0 if one.exact else error < 2.0 ** -(one.bits - 1), name


def test_an_exact_format_is_no_setting():
    assert check_format("int8") == "int8" and check_format(None) is None
    with pytest.raises(ValueError, match="it is 'float16'; choose int8, or leave it out"):
        check_format("float16")


def test_a_format_from_outside_is_multiplied_as_it_decodes(four_bits):
    plain, packed, tokens = drawn(), drawn(), torch.arange(9)[None]
    for linear in plain.modules():
        if isinstance(linear, torch.nn.Linear):
            linear.weight.copy_(decode(encode(linear.weight), torch.float32))
    pack_weights(packed, "four")
    assert {m.stored for m in packed.modules() if isinstance(m, PackedLinear)} == {"four"}
    with torch.inference_mode():
        hidden, got = (m(tokens, torch.arange(9), DenseAttention()) for m in (plain, packed))
        torch.testing.assert_close(got, hidden)
        torch.testing.assert_close(packed.logits(got), plain.logits(hidden))
    (found,) = kernels_in_use(build_engine(EngineModels(text=packed))).values()
    products = {kernel for work, kernel in found.items() if work.endswith("] four x float32")}
    said = "torch: C has no products of four"
    assert (products == {said}) == (native.library() is not None and backend.c_is_allowed())


def test_settings_commands_and_estimates_read_the_table(four_bits, monkeypatch, tmp_path):
    assert ServerConfig.load({"bundle": str(tmp_path), "weights": "four"}).weights == "four"
    said = CliRunner().invoke(app, ["doctor", "--weights", "five"])
    assert said.exit_code == 2
    for word in ("--weights", "five", "int8 or four"):
        assert word in said.output
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10**9)
    size, types = memory.ModelSize(7_000_000_000), [torch.float32, torch.bfloat16]
    with pytest.raises(ValueError, match=r"set `weights: four` \(3\.5 GB\)"):
        memory.fitting_dtypes(types, size, torch.device("cpu"))
    stored = memory.ModelSize(7_000_000_000, weights="four")
    assert memory.fitting_dtypes(types, stored, torch.device("cpu")) == [torch.bfloat16]
