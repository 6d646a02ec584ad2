"""The parts of a score add up to it, and each is what its own source says."""

import math

import numpy as np
import pytest
from msgspec import UNSET, structs

from recserve.cli.terminal import slate_table
from recserve.schemas.items import RecommendRequest, ShownDiscount, UserRef
from tests.support.history_bonuses import bonus_by_hand, bonus_of


@pytest.mark.parametrize("strategy", ["beam", "speculative", "nezha", "similar", "popular"])
@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("shown", [False, True])
def test_parts_add_up(service, monkeypatch, strategy, weight, shown):
    num_items = len(service.catalog.current.catalog.items.ids)
    draw = np.random.default_rng(4)
    table = draw.random((num_items, num_items)) * (draw.random((num_items, num_items)) < 0.05)
    bonus = bonus_of(table, 0.5)
    tables = service._networks.recommender.items
    monkeypatch.setattr(tables, "history_bonus", bonus)
    monkeypatch.setattr(service.recommender.prefixes, "bonus", bonus)
    body = RecommendRequest(user=UserRef(id="user000003"), strategy=strategy, k=20, explain=True)
    if strategy in ("beam", "speculative", "nezha"):
        body = structs.replace(body, dense_weight=weight)
    if shown:
        ids = [item.item_id for item in service.recommend(body).items[:4]]
        rule = ShownDiscount(by=0.25)
        body = structs.replace(body, discount_shown=rule, shown_ids=ids, request_id="r")
    answer = service.recommend(body)
    plain = service.recommend(structs.replace(body, explain=False))
    assert [i.item_id for i in plain.items] == [i.item_id for i in answer.items]
    assert [i.score for i in plain.items] == pytest.approx([i.score for i in answer.items])
    assert all(item.parts is UNSET for item in plain.items)
    if strategy not in ("beam", "speculative"):
        assert all(item.parts is UNSET for item in answer.items)
        return
    rows = {item_id: row for row, item_id in enumerate(service.catalog.current.catalog.items.ids)}
    history = [rows[event.item_id] for event in service.history("user000003").events]
    used = np.array(history[-answer.explanation.history_used :], np.int64)
    wanted = bonus_by_hand(table.astype(np.float32), 0.5, used, num_items)
    alone = structs.replace(body, dense_weight=0.0, discount_shown=None, shown_ids=[], k=500)
    alone = structs.replace(alone, beam_width=500, explain=False)
    log_probs = {item.item_id: item.score for item in service.recommend(alone).items}
    for item in answer.items:
        parts = item.parts
        assert sum(structs.astuple(parts)) == pytest.approx(item.score, abs=1e-4)
        assert parts.log_prob == pytest.approx(log_probs[item.item_id], abs=1e-4)
        assert parts.bonus == pytest.approx(weight * wanted[rows[item.item_id]], abs=1e-4)
        assert parts.dense <= 1e-4 and (weight > 0) == (parts.dense < 0)
        assert parts.shown == (-0.25 if shown and item.item_id in ids else 0)
    cells = list(slate_table(answer, lambda _: None).columns[4].cells)
    assert cells == [f"{100 * math.exp(item.parts.log_prob):.2g} %" for item in answer.items]
