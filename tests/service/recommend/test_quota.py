"""`diversity.at_least`: a slate has items of some kinds where there are any."""

import time

import numpy as np
import pytest

from recserve.bounds import format_time
from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap, Minimum, first_k, meet_minimums
from recserve.schemas.items import InvalidRequest, MissingField
from tests.support.listed_groups import ListedGroups
from tests.support.live_catalogues import base_of, item_like, put
from tests.support.slates import plain_first_k, plain_minimums

DAY_S = 86_400


@pytest.mark.parametrize("most", [1, 3])
def test_quotas_take_the_places_of_the_last_items(most):
    for seed in range(300):
        check_quotas(np.random.default_rng(seed), most)


def check_quotas(draw, most):
    """Caps hold, as many wanted items come as fit, and no better item leaves than must."""
    size, k = int(draw.integers(2, 30)), int(draw.integers(most, 12))
    counts = draw.multinomial(int(draw.integers(most, k + 1)) - most, [1 / most] * most) + 1
    order, kinds = draw.permutation(size), draw.random((most, size)) < 0.4
    groups = ListedGroups(np.arange(size + 1), draw.integers(0, 4, size))
    caps = [Cap(groups, int(draw.integers(1, 4)))] if draw.random() < 0.6 else []
    rows = order[first_k(order, caps, k)]
    more = [order[kind[order]] for kind in kinds]
    more = [own[first_k(own, caps, count)] for own, count in zip(more, counts, strict=True)]
    pairs = zip(counts.tolist(), kinds, strict=True)
    minimums = [Minimum(count, AllowedItems.of(kind)) for count, kind in pairs]
    slate = meet_minimums(rows, more, minimums, caps, k)
    wanted = [(one.count, set(np.flatnonzero(one.items.mask()).tolist())) for one in minimums]
    found = [own.tolist() for own in more]
    assert slate.tolist() == plain_minimums(rows.tolist(), found, wanted, caps, k)
    assert len(set(slate.tolist())) == slate.size <= k
    assert first_k(slate, caps, k).size == slate.size  # the caps hold
    if all(one.is_met(rows) for one in minimums):
        assert slate.tolist() == rows.tolist()
    if not caps:
        for count, kind in wanted:
            assert len(kind & set(slate.tolist())) >= min(count, len(kind))
    if most == 1:
        count, kind = wanted[0]
        every = [row for row in order.tolist() if row in kind]
        assert len(kind & set(slate.tolist())) >= len(plain_first_k(every, caps, count))


def recommend(service, at_least, k=10, **body):
    history = base_of(service).items.ids[:3]
    given = {"history": history, "k": k, "diversity": {"at_least": at_least}, **body}
    return service.recommend(given)


def ids(answer):
    return [item.item_id for item in answer.items]


@pytest.mark.parametrize("strategy", ["auto", "beam", "speculative", "nezha"])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_new_items_are_in_the_slate(service, strategy, count):
    put(service, *(item_like(service, f"new{n}", like=300 + n) for n in range(12)))
    at_least = {"count": count, "new_within_s": DAY_S}
    plain = service.recommend({"history": base_of(service).items.ids[:3], "strategy": strategy})
    answer = recommend(service, at_least, strategy=strategy)
    new = [name for name in ids(answer) if name.startswith("new")]
    assert len(new) >= count and len(answer.items) == 10 and answer.degraded == []
    assert len(set(ids(answer))) == 10
    others = [name for name in ids(answer) if name not in new]
    assert others == [name for name in ids(plain) if not name.startswith("new")][: len(others)]
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)
    assert [item.rank for item in answer.items] == list(range(1, 11))
    assert answer.exact == plain.exact


def test_both_conditions_and_the_filter_of_the_request_hold(service):
    items = base_of(service).items
    category = items.categories[40][0]
    names = [items.ids[row] for row, paths in enumerate(items.categories) if category in paths]
    now_us = time.time_ns() // 1000
    old, recent = (format_time(now_us - int(age * DAY_S * 1e6)) for age in (9, 0.5))
    put(service, *({"item_id": name, "available_from": old} for name in names[:5]))
    put(service, {"item_id": names[6], "available_from": recent})
    put(service, {"item_id": items.ids[1], "available_from": recent})
    inside = {"eq": ["category", category]}
    quota = {"count": 2, "new_within_s": DAY_S, "filter": inside}
    answer = recommend(service, quota, exclude={"seen": False}, explain=True)
    assert names[6] in ids(answer) and answer.degraded == ["at_least_unmet"]
    shut = {"not": {"in": ["item_id", [names[6]]]}}
    answer = recommend(service, quota, filter=shut, exclude={"seen": False})
    assert names[6] not in ids(answer) and answer.degraded == ["at_least_unmet"]
    assert len(answer.items) == 10


@pytest.mark.parametrize("strategy", ["popular", "latest", "cold"])
def test_lists_and_cold_users_have_quotas_too(service, strategy):
    put(service, *(item_like(service, f"new{n}", like=300 + n) for n in range(4)))
    body = {"strategy": strategy} if strategy != "cold" else {}
    answer = recommend(service, {"count": 3, "new_within_s": DAY_S}, history=[], **body)
    assert sum(name.startswith("new") for name in ids(answer)) == 3 + (strategy == "latest")
    assert len(answer.items) == 10 and "at_least_unmet" not in answer.degraded
    rare = base_of(service).items.ids[-1]
    answer = recommend(
        service, {"count": 1, "filter": {"eq": ["item_id", rare]}}, history=[], **body
    )
    assert rare in ids(answer)


def test_caps_hold_beside_a_quota(service):
    body = {"categories": ["Only > One"]}
    put(service, *(item_like(service, f"new{n}", like=300 + n, **body) for n in range(5)))
    diversity = {"at_least": {"count": 4, "new_within_s": DAY_S}, "category": 2}
    answer = recommend(service, None, diversity=diversity)
    assert sum(name.startswith("new") for name in ids(answer)) == 2
    assert len(answer.items) == 10 and answer.degraded == ["at_least_unmet"]


@pytest.mark.parametrize(
    ("at_least", "error", "message"),
    [
        (
            {"count": 11, "new_within_s": 1},
            InvalidRequest,
            "at_least.count: at most k = 10, got 11",
        ),
        ({"count": 2}, MissingField, "new_within_s, filter or both"),
        ({"count": 1, "filter": {"eq": ["colour", 1]}}, InvalidRequest, "at_least.filter.eq"),
        (
            [{"count": 1}, {"count": 2}],
            MissingField,
            r"at_least\[0\]: new_within_s, filter or both",
        ),
        (
            [{"count": 1, "new_within_s": 9}, {"count": 1, "filter": {"eq": ["colour", 1]}}],
            InvalidRequest,
            r"at_least\[1\].filter.eq: unknown field 'colour'",
        ),
        (
            [{"count": 6, "new_within_s": 9}] * 2,
            InvalidRequest,
            "at_least: expected counts that add up to at most k = 10, got 12",
        ),
    ],
)
def test_a_wrong_quota_is_refused_by_name(service, at_least, error, message):
    with pytest.raises(error, match=message):
        recommend(service, at_least)
