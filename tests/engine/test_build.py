"""Assembly of engines."""

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from tests.support.recommenders import CATALOGUES, make

SMALL = EngineConfig(kv_bytes=4 * 2**20)


def test_an_engine_serves_what_it_is_built_from():
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    assert list(build_engine(EngineModels()).schedulers) == []
    engine = build_engine(EngineModels(model), SMALL)
    assert list(engine.schedulers) == ["recommender"]
    assert engine.selectable == ("beam",) and list(engine.drafters) == ["none"]
