"""The column `log_prob` of the slate log, apart from the score."""

import random

import pytest

from recserve.config import ServerConfig
from recserve.server.loader import ServiceLoader
from recserve.service.slate_log.reader import shown_items
from recserve.service.slate_log.records import token_id
from tests.support.live_server import run_server
from tests.support.tiny_bundle import every_strategy_bundle

SCORED = ("beam", "speculative", "specgr")  # the target scores what they answer
OTHERS = ("nezha", "rpg", "dense", "popular")
USED = ("beam", "speculative", "nezha")  # strategies that use a dense weight


def test_log_probs_are_scores_without_the_dense_head(tmp_path):
    """Drawn strategies, weights, caps and quotas, against a search of all items without weight."""
    draw = random.Random(4)
    config = ServerConfig.load(
        {"bundle": every_strategy_bundle(), "store": f"lmdb:{tmp_path}/store", "device": "cpu"}
        | {"journal": tmp_path / "items", "slate_log": tmp_path / "slates", "port": 0}
    )
    service = ServiceLoader(config).first()
    users, items = service.samples(4, 9).values()
    whole = {"strategy": "beam", "dense_weight": 0, "k": 500, "beam_width": 500}
    asked = {}
    with run_server(config, service) as client:
        for number in range(4 * len(SCORED + OTHERS)):
            strategy, user = (SCORED + OTHERS)[number % 7], draw.choice(users)
            body = {"user": {"id": user}, "strategy": strategy, "k": draw.choice((3, 20))}
            if strategy in USED:
                body["dense_weight"] = draw.choice((0, 2.5, 100))
            if draw.random() < 0.5 and strategy in SCORED[:2]:
                quota = {"count": 2, "filter": {"eq": ["item_id", draw.choice(items)]}}
                body["diversity"] = draw.choice(({"category": 2}, {"at_least": quota}))
            answer = client.post("/v1/recommend", json=body)
            assert answer.status_code == 200, answer.text
            assert "log_prob" not in answer.text
            asked[token_id(answer.json()["attribution_token"])] = (user, strategy, answer.json())
        truth = {}
        for user in users:
            body = whole | {"user": {"id": user}, "exclude": {"seen": False}}
            items = service.recommend(body).items
            truth[user] = {item.item_id: item.score for item in items}
    rows = [row for row in shown_items(tmp_path / "slates").to_pylist() if row["token_id"] in asked]
    assert len(rows) == sum(len(answer["items"]) for _, _, answer in asked.values())
    for row in rows:
        user, strategy, _ = asked[row["token_id"]]
        if strategy in SCORED and row["source"] == "model":
            assert row["log_prob"] == pytest.approx(truth[user][row["item_id"]], abs=1e-4)
        else:
            assert row["log_prob"] is None
