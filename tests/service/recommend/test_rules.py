"""Caps and quotas by any column: the plain loop over the whole ranking, of a live catalogue too."""

import random

import numpy as np
import pytest

from recserve.core.diversity import Cap
from recserve.schemas.items import InvalidRequest
from tests.support.listed_groups import ListedGroups
from tests.support.live_catalogues import base_of, item_like, put, slate
from tests.support.slates import plain_first_k, plain_minimums

FIELDS = ("brand", "price", "categories", "category", "available_from")
FAR = "2020-01-01T00:00:00Z"


def values(item, field, level):
    if field in ("categories", "category"):
        end = None if level is None else level + 1
        return {" > ".join(path.split(" > ")[:end]) for path in item.categories}
    value = item.available_from if field == "available_from" else item.attributes.get(field)
    return set() if not value else {value}


def listed(items, field, level):
    """The groups of items by a column, from what the items say of themselves."""
    names = {}
    lists = [[names.setdefault(v, len(names)) for v in values(i, field, level)] for i in items]
    offsets = np.cumsum([0, *map(len, lists)])
    return ListedGroups(offsets, np.array([g for own in lists for g in own], np.int64))


def fulfils(tree, item):
    ((operator, (field, *literals)),) = tree.items()
    if operator == "range":
        price = item.attributes.get(field)
        return price is not None and price >= literals[0]
    return literals[0] in values(item, field, None)


def draw_rules(draw, items):
    """Draws caps and quotas with k; the counts of the quotas add up to at most k."""
    k = draw.choice([5, 12, 40])
    caps = []
    for field in draw.sample(FIELDS, draw.randrange(4)):
        cap = {"field": field, "most": draw.choice([1, 2, 5])}
        if field.startswith("categor") and draw.random() < 0.7:
            cap["level"] = draw.randrange(3)
        caps.append(cap)
    quotas = []
    for _ in range(draw.randrange(4)):
        item = draw.choice(items)
        brand = item.attributes.get("brand")
        tree = draw.choice(
            [{"eq": ["brand", brand or "none"]}, {"range": ["price", draw.choice([5, 20, 40])]}]
        )
        quotas.append({"count": draw.randrange(1, k // 3 + 1), "filter": tree})
    return k, caps, quotas


def as_json(tree):
    return {"range": [*tree["range"], None]} if "range" in tree else tree


def check(service, draw):
    ranked = [one for one in slate(service, k=700).items if one.source == "model"]
    items = [service.item(one.item_id) for one in ranked]
    order = list(range(len(items)))
    k, caps, quotas = draw_rules(draw, items)
    limits = [Cap(listed(items, c["field"], c.get("level")), c["most"]) for c in caps]
    wanted = [
        (q["count"], {row for row in order if fulfils(q["filter"], items[row])}) for q in quotas
    ]
    rows = plain_first_k(order, limits, k)
    more = [plain_first_k(sorted(kind), limits, count) for count, kind in wanted]
    expected = sorted(plain_minimums(rows, more, wanted, limits, k))
    answer = service.recommend(
        {
            "history": base_of(service).items.ids[:3],
            "k": k,
            "beam_width": 700,
            "exclude": {"seen": False},
            "diversity": {
                "caps": caps,
                "at_least": [{**q, "filter": as_json(q["filter"])} for q in quotas],
            },
        }
    )
    found = [one.item_id for one in answer.items if one.source == "model"]
    assert found == [items[row].item_id for row in expected], (caps, quotas)
    met = all(len(kind & set(expected)) >= count for count, kind in wanted)
    assert met == ("at_least_unmet" not in answer.degraded) or len(expected) < k


@pytest.mark.parametrize("seed", range(4))
def test_rules_are_those_of_a_plain_loop(service, seed):
    draw = random.Random(seed)
    ids = base_of(service).items.ids
    for number in range(3):
        for _ in range(4):
            check(service, draw)
        changed = draw.sample(ids, 30)
        put(
            service,
            item_like(service, f"new{number}", like=draw.randrange(300), brand="Nova", price=7.5),
            *(
                {
                    "item_id": name,
                    "categories": draw.sample(
                        ["One > Two", "One", "Three > Two"], draw.randrange(3)
                    ),
                    "brand": draw.choice(["Nova", "brand01", None]),
                    "available_from": draw.choice([None, FAR]),
                }
                for name in changed
            ),
        )
        service.hide_item(ids[number])
    for _ in range(4):
        check(service, draw)


@pytest.mark.parametrize("strategy", ["popular", "latest", "cold", "nezha", "speculative"])
def test_lists_and_other_strategies_keep_the_rules(service, strategy):
    body = {"strategy": strategy, "history": base_of(service).items.ids[:3]}
    if strategy == "cold":
        body = {"history": []}
    dear = {"range": ["price", 30, None]}
    rare = base_of(service).items.ids[-2:]
    diversity = {
        "caps": [{"field": "brand", "most": 1}, {"field": "categories", "level": 0, "most": 3}],
        "at_least": [
            {"count": 2, "filter": dear},
            {"count": 1, "filter": {"in": ["item_id", rare]}},
        ],
    }
    answer = service.recommend({**body, "k": 8, "diversity": diversity})
    items = [service.item(one.item_id) for one in answer.items]
    brands = [item.attributes["brand"] for item in items if item.attributes.get("brand")]
    tops = [{path.split(" > ")[0] for path in item.categories} for item in items]
    assert len(set(brands)) == len(brands)
    assert all(sum(top in own for own in tops) <= 3 for top in set().union(*tops))
    assert "at_least_unmet" not in answer.degraded
    assert sum((item.attributes["price"] or 0) >= 30 for item in items) >= 2
    assert {item.item_id for item in items} & set(rare)


@pytest.mark.parametrize(
    ("cap", "message"),
    [
        (
            {"field": "brnd", "most": 1},
            r"caps\[1\].field: unknown field 'brnd'; did you mean brand?",
        ),
        ({"field": "item_id", "most": 1}, r"caps\[1\].field: expected a field that items share"),
        ({"field": "brand", "level": 0, "most": 1}, r"caps\[1\].level: only categories has levels"),
        ({"field": "brand", "most": 0}, r"caps\[1\].most: expected int >= 1, got 0"),
        ({"field": "categories", "level": 16, "most": 1}, r"caps\[1\].level: expected int <= 15"),
        ({"field": "brand"}, r"caps\[1\]"),
    ],
)
def test_a_wrong_cap_is_refused_by_name(service, cap, message):
    body = {"history": [], "diversity": {"caps": [{"field": "brand", "most": 1}, cap]}}
    with pytest.raises(InvalidRequest, match=message):
        service.recommend(body)
