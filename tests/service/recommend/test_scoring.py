"""A request to a bundle that was trained here may name another scoring rule."""

import math

import pytest
from msgspec import UNSET

from recserve.schemas.items import InvalidRequest


def test_an_own_bundle_scores_by_a_named_rule(service):
    ids = service.samples(0, 4)["items"]
    plain = service.recommend({"history": ids[:3], "k": 5})
    assert plain.scoring is UNSET
    body = {"history": ids[:3], "k": 5, "dense_weight": 0, "beam_width": 1000}
    own = service.recommend({**body, "strategy": "beam"})
    same = service.recommend({**body, "scoring": {"rule": "children"}})
    assert [(i.item_id, i.score) for i in same.items] == [(i.item_id, i.score) for i in own.items]
    assert same.scoring.rule == "children" and same.strategy == "beam"
    halved = service.recommend({**body, "scoring": {"length_penalty": 1}})
    levels = len(service.recommend({**body, "explain": True}).items[0].semantic_id)
    assert [i.item_id for i in halved.items] == [i.item_id for i in own.items]
    for one, other in zip(halved.items, own.items, strict=True):
        assert math.isclose(one.score * levels, other.score, rel_tol=1e-5)
    assert halved.exact
    wide = service.recommend({**body, "scoring": {"rule": "vocabulary"}})
    assert wide.scoring.rule == "vocabulary"
    assert max(i.score for i in wide.items) < own.items[0].score
    with pytest.raises(InvalidRequest, match="dense_weight 0"):
        service.recommend({**body, "dense_weight": 1, "scoring": {"length_penalty": 1}})
