"""Assembly of engines, and the deprecated constructor."""

import pytest
import torch

import recserve
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from tests.support.recommenders import CATALOGUES, draw_root, make

SMALL = EngineConfig(kv_bytes=4 * 2**20)


@torch.inference_mode()
def test_the_deprecated_constructor_warns_and_answers_alike():
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    request = SlateQuery(draw_root(model, 5, 0), trie, 5, 8)
    with pytest.warns(DeprecationWarning, match="build_engine"):
        old = recserve.Engine(model, None, SMALL)
    assert isinstance(old, Engine)
    slates = [engine.run(request) for engine in (old, build_engine(EngineModels(model), SMALL))]
    assert slates[0].rows.tolist() == slates[1].rows.tolist()
    assert slates[0].scores.tolist() == slates[1].scores.tolist()


def test_the_old_name_of_the_token_capacity_warns():
    engine = build_engine(EngineModels(make(CATALOGUES["ordinary"], "items", "children")[0]), SMALL)
    with pytest.warns(DeprecationWarning, match="token_capacity"):
        assert engine.room("recommender") == engine.token_capacity("recommender")


def test_an_engine_serves_what_it_is_built_from():
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    assert list(build_engine(EngineModels()).schedulers) == []
    engine = build_engine(EngineModels(model), SMALL)
    assert list(engine.schedulers) == list(engine.background) == ["recommender"]
    shared, own = engine.background["recommender"], engine.schedulers["recommender"]
    assert shared.cache is own.cache and shared.allocator is own.allocator
    assert engine.strategies == ("beam",) and list(engine.drafters) == ["none"]
