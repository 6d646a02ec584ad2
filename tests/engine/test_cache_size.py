"""Sizes and types that the settings leave open: from free memory on CUDA, as before on a CPU."""

import logging

import pytest
import torch

from recserve.config import ConfigError, ServerConfig
from recserve.engine.beam_search_graph import SearchLimits
from recserve.engine.build import EngineModels, _set_kv_bytes, build_engine, warn_if_slow
from recserve.engine.capture import PREFILL_LIMITS
from recserve.engine.engine_config import EngineConfig
from recserve.engine.kv_cache import DEFAULT_BYTES, cache_bytes
from recserve.engine.text_step_graph import TextStepLimits
from recserve.models.config import DecoderConfig
from recserve.server.loader import ServiceLoader
from recserve.service.model_loader import resolve_dtype
from tests.support.recommenders import CATALOGUES, make
from tests.support.text_plain import drawn_model

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
DECODER = DecoderConfig(32, 2, 4, 2, 8, 64, max_positions=64)
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 80 GiB, of which the weights have left 70."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_the_cache_takes_what_weights_and_graphs_leave(gpu):
    assert cache_bytes(CUDA, 1, 4 * GIB) == 58 * GIB  # a tenth of 80 stays free
    assert cache_bytes(CUDA, 2, 4 * GIB) == 29 * GIB
    assert cache_bytes(CUDA, 1, 100 * GIB) == DEFAULT_BYTES
    assert cache_bytes(CPU, 3, 4 * GIB) == DEFAULT_BYTES == 256 * 2**20


def test_an_engine_divides_memory_among_its_models(gpu, monkeypatch):
    model, text = make(CATALOGUES["ordinary"], "items", "children")[0], drawn_model(1)
    found = []
    monkeypatch.setattr(
        "recserve.engine.build.cache_bytes", lambda *sizes: found.append(sizes) or 2**22
    )
    for graphs in (None, False):
        for models in (EngineModels(model), EngineModels(model, text=text)):
            config = EngineConfig(kv_bytes="auto", graphs=graphs)
            assert _set_kv_bytes(config, models).kv_bytes == 2**22
    items = SearchLimits().bytes + PREFILL_LIMITS.bytes
    steps = TextStepLimits().bytes + PREFILL_LIMITS.bytes
    assert found == [(CPU, 1, items), (CPU, 2, items + steps), (CPU, 1, 0), (CPU, 2, 0)]
    engine = build_engine(EngineModels(text=text), EngineConfig(kv_bytes="auto"))
    assert engine.config.kv_bytes == 2**22
    assert _set_kv_bytes(EngineConfig(kv_bytes=7), EngineModels(model)).kv_bytes == 7


def test_a_server_that_replaces_bundles_leaves_room_for_the_next(tmp_path):
    def size(**settings):
        return ServiceLoader(ServerConfig(bundle=tmp_path, **settings))._options(None).engine

    assert size().kv_bytes == "auto"
    assert size(bundles_dir=tmp_path).kv_bytes == DEFAULT_BYTES
    assert size(bundles_dir=tmp_path, kv_bytes=2**30).kv_bytes == 2**30


def test_a_size_is_a_number_or_auto(tmp_path, monkeypatch):
    def size(value):
        return ServerConfig.load({"bundle": tmp_path, "kv_bytes": value}).kv_bytes

    assert size(2**20) == 2**20 and size("auto") == "auto" and size(1e9) == 10**9
    for wrong in (2**20 - 1, "16 GB", -1, "", True):
        with pytest.raises(ConfigError, match="^kv_bytes: expected auto, or 1048576 bytes"):
            size(wrong)
    monkeypatch.setenv("RECSERVE_KV_BYTES", "16777216")
    assert size(None) == 2**24


@pytest.mark.parametrize("native", [True, False])
def test_types_that_are_left_open(native, monkeypatch):
    def supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    fastest = torch.bfloat16 if native else torch.float32
    assert resolve_dtype(None, CUDA) == resolve_dtype("auto", CUDA) == fastest
    assert resolve_dtype("float32", CUDA) == torch.float32
    assert resolve_dtype(None, CPU) == torch.float32


def test_what_is_slow_on_cuda_is_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="recserve"):
        warn_if_slow("recommender", torch.bfloat16, 16_000, 1000)
        assert not caplog.records
        warn_if_slow("recommender", torch.float32, 15_999, 1000)
    assert "float32" in caplog.text and "raise kv_bytes" in caplog.text
