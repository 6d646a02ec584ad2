"""A strategy of another distribution: one file, found by its entry point, served by Service."""

import sys
import textwrap

import pytest

from recserve.core.plugins import PluginError
from recserve.schemas.items import Exclusions, InvalidRequest, RecommendRequest
from recserve.search.strategy import strategy_classes
from recserve.service import Service
from tests.support.tiny_bundle import shared_bundle

STRATEGY = '''
"""The first allowed items of the catalogue: a baseline that needs no head."""

import numpy as np

from recserve.core.strategy import OneRoundStrategy
from recserve.search.filters import usable_items
from recserve.search.strategy import RecommendStrategy
from recserve.search.slates import slate_under_caps


class FirstItems(OneRoundStrategy, RecommendStrategy):
    """Items in catalogue order, under the request's exclusions, filters and caps."""

    name = "first_items"

    @classmethod
    def from_models(cls, model, heads):
        return cls()

    def results(self, sequences, draft, hidden):
        return [self._slate(sequence) for sequence in sequences]

    def _slate(self, sequence):
        request = sequence.request
        trie = request.trie
        usable = usable_items([request], trie.num_rows, trie.device)
        rows = np.arange(trie.num_rows) if usable is None else np.flatnonzero(usable[0].numpy())
        scores = -np.arange(rows.size, dtype=np.float32)
        return slate_under_caps(sequence, rows, scores, complete=True, exact=False)
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a distribution with one strategy into a folder on the path."""

    def install(source, entry):
        (tmp_path / "acme_strategy.py").write_text(textwrap.dedent(source))
        info = tmp_path / "acme_recommend-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: acme-recommend\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[recserve.strategies]\n{entry}\n")
        monkeypatch.syspath_prepend(tmp_path)
        strategy_classes.cache_clear()

    yield install
    sys.modules.pop("acme_strategy", None)
    strategy_classes.cache_clear()


def test_an_installed_strategy_is_served(installed, tmp_path):
    installed(STRATEGY, "first_items = acme_strategy:FirstItems")
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu") as service:
        ids = service.catalog.current.catalog.items.ids
        body = {"history": list(ids[:3]), "k": 4, "strategy": "first_items"}
        answer = service.recommend(RecommendRequest(**body))
        assert answer.strategy == "first_items" and not answer.exact
        assert [item.item_id for item in answer.items] == list(ids[3:7])
        body["exclude"] = Exclusions(item_ids=[ids[4]], seen=False)
        filtered = service.recommend(RecommendRequest(**body))
        assert [item.item_id for item in filtered.items] == [ids[0], ids[1], ids[2], ids[3]]
        assert service.recommend(RecommendRequest(history=list(ids[:3]))).strategy != "first_items"
        with pytest.raises(InvalidRequest, match="does not use it"):
            service.recommend(RecommendRequest(**body, dense_weight=1.0))
        assert "first_items" in str(service.models())


@pytest.mark.parametrize(
    "source,entry,message",
    [
        ("1 / 0", "first_items = acme_strategy:FirstItems", "cannot be loaded"),
        ("FirstItems = dict", "first_items = acme_strategy:FirstItems", "not a class derived"),
        (STRATEGY, "others = acme_strategy:FirstItems", "use the same in both"),
        (STRATEGY, "beam = acme_strategy:FirstItems", "the name 'beam' is already taken"),
    ],
)
def test_a_strategy_that_cannot_be_used_names_its_distribution(installed, source, entry, message):
    installed(source, entry)
    with pytest.raises(PluginError, match=f"acme-recommend.*{message}"):
        strategy_classes()
