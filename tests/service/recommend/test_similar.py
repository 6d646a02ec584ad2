"""Similar items: brute force over vectors and links, of a live catalogue, through every door."""

import random

import numpy as np
import pytest

from recserve.bundle.bundle import Bundle
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.schemas.items import InvalidRequest
from recserve.service import Service, ServiceOptions
from recserve.training.similar import WEIGHTS, session_cases, train_similar
from tests.support.live_catalogues import base_of, item_like, put
from tests.support.live_server import live
from tests.support.tiny_bundle import tiny_bundle


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tiny_bundle(tmp_path_factory.mktemp("similar"))
    return folder, train_similar(Bundle.open(folder))


def open_service(folder, tmp_path):
    options = ServiceOptions(journal=tmp_path / "items")
    return Service.open(folder, f"lmdb:{tmp_path}/store", "cpu", options)


@pytest.fixture
def client(trained, tmp_path):
    with live(open_service(trained[0], tmp_path)) as running:
        yield running


def links_of(bundle):
    """link(a, i) of training events, by a plain loop."""
    train, sums = bundle.events().leave_one_out().train, {}
    for user in range(train.num_users):
        rows = train.item_rows[train.offsets[user] : train.offsets[user + 1]].tolist()
        for place, row in enumerate(rows):
            for distance, other in enumerate(rows[place + 1 : place + 4], 1):
                sums[row, other] = sums.get((row, other), 0) + 1 / distance
    return {pair: np.log1p(value) for pair, value in sums.items()}


def plain_scores(service, by, given, links, weight):
    """The similarity of every item that may be shown, in 64 bits."""
    items, snapshot = service.catalog.current.items, service.catalog.current
    rows = snapshot.rows_of(dict.fromkeys(given))
    found = {}
    for row in range(items.num_rows):
        if row in rows or not snapshot.answerable(np.array([row]))[0]:
            continue
        near = linked = 0.0
        for other in rows:
            one, two = (items.vectors[r].astype(np.float64) for r in (row, other))
            near += one @ two / (np.linalg.norm(one) * np.linalg.norm(two))
            linked += links.get((items.trained_row(other), items.trained_row(row)), 0.0)
        near, linked = near / len(rows), linked / len(rows)
        if by != "links" or linked:
            score = {"vectors": near, "links": linked, "both": near + weight * linked}[by]
            found[items.item_id(row)] = score
    return found


def check(service, draw, links, weight, ask):
    visible = [
        name for name in base_of(service).items.ids if service.catalog.current.rows.get(name) >= 0
    ]
    given = draw.sample([*visible, "new0"], draw.choice([1, 1, 2, 5]))
    by, k = draw.choice(["vectors", "links", "both"]), draw.choice([1, 10, 60])
    left_out = draw.sample(visible, 5)
    body = {"item_ids": given, "by": by, "k": k, "exclude": {"item_ids": left_out}}
    if draw.random() < 0.5:
        body["filter"] = {"range": ["price", 10, None]}
    if draw.random() < 0.5:
        body["diversity"] = {"caps": [{"field": "brand", "most": 2}]}
    answer = ask(body)
    scores = plain_scores(service, by, given, links, weight)
    expected, brands = [], {}
    for name, score in sorted(scores.items(), key=lambda pair: -pair[1]):
        item = service.item(name)
        brand, price = item.attributes.get("brand"), item.attributes.get("price")
        if name in left_out or ("filter" in body and (price is None or price < 10)):
            continue
        if "diversity" in body and brand:
            brands[brand] = brands.get(brand, 0) + 1
            if brands[brand] > 2:
                continue
        expected.append(score)
    found = [item["score"] for item in answer["items"] if item["source"] == "model"]
    assert found == pytest.approx(expected[:k], abs=2e-5)
    for item in answer["items"]:
        assert item["item_id"] not in given and item["item_id"] not in left_out
        if item["source"] == "model":
            assert item["score"] == pytest.approx(scores[item["item_id"]], abs=2e-5)
    assert answer["exact"] or len(found) < k


def test_similar_items_are_those_of_brute_force(trained, client):
    service, draw = client.app.state.lifecycle.service, random.Random(4)
    links, weight = links_of(service.bundle), trained[1].weight

    def over_http(body):
        return client.post("/v1/similar", json=body).raise_for_status().json()

    put(service, item_like(service, "new0", like=12, brand="Nova", price=20.0))
    ids = base_of(service).items.ids
    for number in range(3):
        for _ in range(6):
            check(service, draw, links, weight, over_http)
        vector = base_of(service).vectors[draw.randrange(400)].tolist()
        put(
            service,
            item_like(service, f"new{number + 1}", like=number),
            {"item_id": ids[50 + number], "embedding": vector},
        )
        service.hide_item(ids[number])


def test_all_doors_give_the_same(client):
    service = client.app.state.lifecycle.service
    ids = base_of(service).items.ids
    for by, strategy in (
        ("both", "similar"),
        ("vectors", "similar_vectors"),
        ("links", "similar_links"),
    ):
        body = {"item_ids": ids[:2], "by": by, "k": 7, "fields": ["title"]}
        asked = {"history": ids[:2], "strategy": strategy, "k": 7, "fields": ["title"]}
        answers = [
            client.post("/v1/similar", json=body).json(),
            client.post("/v1/recommend", json=asked).json(),
        ]
        python = service.similar(body)
        shown = [[(i["item_id"], i["score"], i["fields"]) for i in a["items"]] for a in answers]
        assert shown[0] == shown[1] != []
        assert shown[0] == [(i.item_id, i.score, i.fields) for i in python.items]
        assert {one["strategy"] for one in answers} == {strategy} == {python.strategy}
        filled = any(item["source"] != "model" for item in answers[0]["items"])
        assert answers[0]["rounds"] == 0 and answers[0]["exact"] != filled
    unknown = service.similar({"item_ids": ["nothing"]})
    assert unknown.degraded == ["unknown_history_items", "cold_start"]
    assert {item.source for item in unknown.items} == {"popular"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"item_ids": []}, "item_ids: expected .*length >= 1"),
        ({}, "item_ids"),
        ({"item_ids": ["item000001"] * 65}, "item_ids: expected .*length <= 64"),
        ({"item_ids": ["item000001"], "by": "taste"}, "by: "),
        ({"item_ids": ["item000001"], "k": 0}, "k: expected int >= 1, got 0"),
        ({"item_ids": ["item000001"], "user": "u"}, "user: unknown field"),
        ({"item_ids": ["item000001"], "filter": {"eq": ["colour", 1]}}, "filter.eq: unknown field"),
        ({"item_ids": ["item000001"], "by": "links"}, "strategy: .*similar_links.*train similar"),
    ],
)
def test_a_wrong_request_is_refused_by_name(service, body, message):
    with pytest.raises(InvalidRequest, match=message):
        service.similar(body)


def test_without_links_vectors_alone_count(service):
    ids = base_of(service).items.ids
    both, vectors = (service.similar({"item_ids": ids[:1], "by": by}) for by in ("both", "vectors"))
    assert [i.item_id for i in both.items] == [i.item_id for i in vectors.items]
    for field in ({"dense_weight": 1.0}, {"outcome": {"click": 1.0}}):
        with pytest.raises(InvalidRequest, match=next(iter(field))):
            service.recommend({"history": ids[:1], "strategy": "similar", **field})


def test_validation_chooses_the_weight(trained, tmp_path):
    """The chosen weight is the best of the figures, and evaluation gives the slates of a server."""
    folder, fit = trained
    bundle = Bundle.open(folder)
    assert fit.ndcg[fit.weight] == max(fit.ndcg.values()) and set(fit.ndcg) == set(WEIGHTS)
    assert bundle.manifest.sections["similar"]["weight"] == fit.weight
    bundle.verify()
    cases, in_session = session_cases(bundle.events())
    assert in_session == fit.in_session and len(cases) == fit.users
    for strategy in ("similar", "similar_links"):
        found = evaluate_bundle(bundle, EvaluationOptions(strategy=strategy, users=8))
        assert 0 <= found.columns["filtered"]["ndcg@10"] <= 1
        log = bundle.events()
        with open_service(folder, tmp_path / strategy) as service:
            ids = base_of(service).items.ids
            tests = [u for u in range(log.num_users) if log.offsets[u + 1] - log.offsets[u] >= 3]
            assert len(found.slates["kept"]) == min(8, len(tests))
            slates = {tuple(row[row >= 0].tolist()) for row in found.slates["kept"]}
            served = set()
            for user in tests:
                last = ids[log.item_rows[log.offsets[user + 1] - 2]]
                answer = service.recommend({"history": [last], "strategy": strategy, "k": 10})
                own = [i.item_id for i in answer.items if i.source == "model"]
                served.add(tuple(service.catalog.current.rows_of(own)))
            assert slates <= served


@pytest.mark.parametrize("strategy", ["similar", "item_knn"])
def test_sessions_of_an_evaluation_are_those_of_a_plain_loop(trained, strategy):
    bundle = Bundle.open(trained[0])
    log = bundle.events()
    gaps = []
    for first, stop in zip(log.offsets[:-1].tolist(), log.offsets[1:].tolist(), strict=True):
        if stop - first >= 3:
            gaps.append((log.times[stop - 1] - log.times[stop - 2]) / 1e6)
    for limit in (min(gaps), sorted(gaps)[len(gaps) // 2], max(gaps)):
        options = EvaluationOptions(strategy=strategy, session_s=float(limit))
        assert evaluate_bundle(bundle, options).users == sum(gap <= limit for gap in gaps)
    if min(gaps) > 0:
        with pytest.raises(ValueError, match="no held-out event follows another one within"):
            evaluate_bundle(bundle, EvaluationOptions(strategy=strategy, session_s=min(gaps) / 2))
