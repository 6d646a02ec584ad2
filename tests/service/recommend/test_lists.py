"""The lists `popular` and `latest`: as strategies, for cold users, and where slates are filled."""

import time
from pathlib import Path

import numpy as np
import pytest

from recserve.bounds import format_time
from recserve.bundle.bundle import Bundle
from recserve.features.catalog import popularity as popularity_module
from recserve.features.catalog.popularity import Popularity, SavedCounts
from recserve.service import Service, ServiceOptions
from recserve.service import live_catalog as live_catalog_module
from recserve.service.replacement import hand_over, open_successor
from tests.support.live_catalogues import base_of, item_like, opened, put
from tests.support.tiny_bundle import shared_bundle

HOUR_US = 3600 * 10**6


def exact_counts(trained, events, size, half_life_us, start_us, now_us):
    """Returns the counts by the formula, event by event."""
    counts = np.zeros(size)
    counts[: len(trained)] = trained * 2.0 ** (-(now_us - start_us) / half_life_us)
    for row, time_us in events:
        counts[row] += 2.0 ** (-(now_us - time_us) / half_life_us)
    return counts


@pytest.mark.parametrize("seed", range(8))
def test_counts_and_order_are_those_of_the_formula(seed, monkeypatch):
    """For drawn events, late ones and long pauses among them, and a growing catalogue."""
    monkeypatch.setattr(popularity_module, "MAX_TOUCHED", int(5 * 10 ** (seed % 3)))
    draw = np.random.default_rng(seed)
    trained, size, now = draw.integers(0, 5, 40).astype(float), 40, 10**15
    counts, events, start = Popularity(trained, 3600.0, now), [], now
    for _ in range(60):
        size += int(draw.integers(0, 2))
        counts.extend(size)
        rows = draw.integers(0, size, int(draw.integers(1, 6)))
        now += int(draw.integers(0, 3 * HOUR_US)) if draw.random() < 0.95 else 700 * HOUR_US
        times = now - draw.integers(0, 9 * HOUR_US, rows.size)
        counts.count(rows, times)
        events += zip(rows.tolist(), times.tolist(), strict=True)
        if draw.random() < 0.4:
            wanted = exact_counts(trained, events, size, HOUR_US, start, counts.latest_us)
            np.testing.assert_allclose(counts.at(np.arange(size)), wanted, rtol=1e-6, atol=1e-100)
            order = counts.best(size)
            assert sorted(order.tolist()) == list(range(size))
            assert (wanted[order][1:] <= wanted[order][:-1] * (1 + 1e-9) + 1e-100).all()
            few = int(draw.integers(1, size))
            assert counts.best(few).tolist() == order[:few].tolist()


def view(service, item_id, times, user="viewer", ago_s=0.0):
    """Posts events of an item, `ago_s` before now."""
    moment = format_time(time.time_ns() // 1000 - int(ago_s * 1e6))
    events = [
        {"user_id": f"{user}{n}", "item_id": item_id, "timestamp": moment} for n in range(times)
    ]
    assert service.add_events({"events": events}).accepted == times


def names(service, strategy="popular", k=10, **body):
    """Returns the ids of a list, without a user."""
    answer = service.recommend({"strategy": strategy, "k": k, **body})
    assert {item.source for item in answer.items} <= {strategy}
    assert answer.strategy == strategy and not answer.exact and answer.rounds == 0
    assert all(item.score is None for item in answer.items)
    return [item.item_id for item in answer.items]


def test_the_next_answer_counts_events(service):
    """In the list, for cold users and where a slate is filled alike."""
    ids, trained = base_of(service).items.ids, base_of(service).popularity
    by_training = [ids[row] for row in np.argsort(-trained, kind="stable")]
    assert names(service) == by_training[:10]
    rare = by_training[-1]
    view(service, rare, int(trained.max()) + 1)
    assert names(service) == [rare, *by_training[:9]]
    cold = service.recommend({"user": {"id": "nobody"}, "k": 10})
    assert [item.item_id for item in cold.items] == [rare, *by_training[:9]]
    assert cold.strategy == "popular" and cold.degraded == ["cold_start"]
    assert service.item(rare).popularity == pytest.approx(trained.min() + trained.max() + 1)


def test_old_events_count_less(tmp_path):
    options = ServiceOptions(journal=tmp_path / "items", popular_half_life_s=60.0)
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu", options) as service:
        one, two = base_of(service).items.ids[:2]
        view(service, one, 400, ago_s=600)  # counts less than one event
        view(service, two, 200)
        assert names(service)[0] == two
        assert service.item(one).popularity < base_of(service).popularity[0] + 1


@pytest.mark.parametrize("strategy", ["popular", "latest"])
def test_lists_obey_filter_exclusions_history_and_caps(service, strategy):
    put(service, item_like(service, "new"), item_like(service, "newer"))
    view(service, "new", 30)
    whole = names(service, strategy, 502)
    assert len(whole) == 502 and len(set(whole)) == 502
    items = base_of(service).items
    category = items.categories[0][0]
    inside = {items.ids[row] for row, paths in enumerate(items.categories) if category in paths}
    only = names(service, strategy, 502, filter={"eq": ["category", category]})
    assert only == [name for name in whole if name in inside]
    excluded = {"item_ids": whole[:7]}
    assert names(service, strategy, 502, exclude=excluded) == whole[7:]
    assert names(service, strategy, 9, history=whole[1:3]) == [whole[0], *whole[3:11]]
    unseen = names(service, strategy, 502, history=whole[1:3], exclude={"seen": False})
    assert unseen == whole
    capped = names(service, strategy, 502, diversity={"category": 1})
    paths = [set(service.item(name).categories) for name in capped]
    assert sum(map(len, paths)) == len(set().union(*paths))
    assert capped[0] == whole[0]
    service.hide_item(whole[0])
    assert names(service, strategy, 502) == whole[1:]


def test_latest_is_by_time(service):
    ids = base_of(service).items.ids
    assert names(service, "latest", 3) == ids[:-4:-1]
    put(service, item_like(service, "first"))
    put(service, item_like(service, "second"))
    assert names(service, "latest", 3) == ["second", "first", ids[-1]]
    put(service, {"item_id": "second", "title": "Other words"})
    moved = item_like(service, "first", like=77)
    put(service, moved)
    assert names(service, "latest", 3) == ["second", "first", ids[-1]]
    hour_ago = format_time(time.time_ns() // 1000 - HOUR_US)
    put(service, {"item_id": ids[3], "available_from": hour_ago})
    put(service, {"item_id": "second", "available_from": "2020-01-01T00:00:00Z"})
    assert names(service, "latest", 4) == ["first", ids[3], "second", ids[-1]]


def test_counts_are_kept_over_a_restart(tmp_path):
    """Those of the bundle's items, of later items and of items with a new vector."""
    with opened(tmp_path) as service:
        put(service, item_like(service, "new"))
        rare, other = base_of(service).items.ids[-2:]
        view(service, "new", 90)
        view(service, rare, 80)
        view(service, other, 70)
        put(service, item_like(service, other, like=3), item_like(service, "new", like=4))
        before = names(service, k=30)
        assert before[:3] == ["new", rare, other]
    with opened(tmp_path) as service:
        assert names(service, k=30) == before
        counts = [service.item(name).popularity for name in before[:3]]
        assert counts == pytest.approx([90, 80, 70], abs=3)
        view(service, other, 25)
        assert names(service)[:3] == [other, "new", rare]
    with opened(tmp_path) as service:
        assert names(service)[:3] == [other, "new", rare]
    assert [path.name for path in Path(tmp_path).rglob("popularity*")] == ["popularity.safetensors"]


def test_a_kill_loses_a_minute_of_counts_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(live_catalog_module, "SAVE_COUNTS_S", 0.0)
    with opened(tmp_path) as service:
        rare = base_of(service).items.ids[-1]
        view(service, rare, 50)
        for _ in range(100):  # a thread writes the file
            if service.catalog.counts_file.exists():
                break
            time.sleep(0.05)
        saved = SavedCounts.load(service.catalog.counts_file)
        assert saved.counts.max() == pytest.approx(50, abs=3)


def test_another_bundle_continues_the_counts(tmp_path):
    with opened(tmp_path) as service:
        put(service, item_like(service, "new"))
        rare = base_of(service).items.ids[-1]
        view(service, rare, 80)
        view(service, "new", 90)
        bundle = Bundle.open(shared_bundle())
        bundle.verify()
        options = ServiceOptions(journal=tmp_path / "other")
        with open_successor(service, bundle, "cpu", options) as new:
            hand_over(service, new, lambda: None)
            assert names(new)[:2] == ["new", rare]
            view(service, rare, 20)  # a request that the old service still answers
            assert names(new)[:2] == [rare, "new"]
            service.close()
    with opened(tmp_path) as service:
        assert names(service)[:2] == [rare, "new"]


def test_duplicates_and_refused_events_do_not_count(service):
    rare = base_of(service).items.ids[-1]
    before = service.item(rare).popularity
    event = {"user_id": "u", "item_id": rare, "event_id": "one"}
    service.add_events({"events": [event, event, {**event, "type": "no such", "event_id": "two"}]})
    service.add_events({"events": [event]})
    assert service.item(rare).popularity == pytest.approx(before + 1, abs=1e-2)
