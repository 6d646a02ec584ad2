"""Items begin and end by the clock: in slates of every strategy, rankings, lists and filters."""

import random
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.batch import Defaults, SlateRecipe
from recserve.bounds import format_time
from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.schemas.browse import ItemsQuery
from recserve.schemas.items import RollbackRequest
from recserve.service import Service, ServiceOptions
from recserve.service import snapshot as snapshot_module
from recserve.service.replacement import hand_over, open_successor, probe
from tests.support.live_catalogues import base_of, item_like, opened, put, slate
from tests.support.tiny_bundle import shared_bundle, with_models

SECOND = 10**6
NOW = (int(time.time()) + 86_400) * SECOND  # services open before, so that no time has passed


class Clock:
    """A clock that a test sets."""

    def __init__(self, *services):
        self.now_us = NOW
        for service in services:
            service.catalog.clock = self

    def __call__(self):
        return self.now_us


def at(seconds):
    """Returns the text of a time so many seconds after NOW."""
    return format_time(NOW + seconds * SECOND)


def ids(answer):
    return {item.item_id for item in answer.items}


def newest(service):
    return [item.item_id for item in slate(service, strategy="latest").items]


def everywhere(service, item_id):
    """Returns in which answers an item is."""
    everything = {"k": 700, "beam_width": 700, "exclude": {"seen": False}}
    history = base_of(service).items.ids[:3]
    found = {}
    for strategy in (*service.engine.selectable, "popular", "latest"):
        body = {**everything, "history": history, "strategy": strategy}
        found[strategy] = item_id in ids(service.recommend(body))
        body["filter"] = {"in": ["item_id", [item_id]]}
        found[f"{strategy}, filtered"] = item_id in ids(service.recommend(body))
    found["cold"] = item_id in ids(service.recommend({**everything, "history": []}))
    for scorer in ("ranker", "likelihood"):
        body = {"history": history, "candidates": [{"item_id": item_id}], "scorer": scorer}
        answer = service.rank(body)
        found[scorer] = item_id in ids(answer)
        assert (item_id in answer.missing_item_ids) != found[scorer]
    return set(found.values())


def test_time_alone_begins_and_ends_an_item(service):
    clock = Clock(service)
    put(service, item_like(service, "sale", available_from=at(10), expires_at=at(20)))
    for second, there in (
        (0, False),
        (9, False),
        (10, True),
        (19, True),
        (20, False),
        (9e5, False),
    ):
        clock.now_us = NOW + int(second * SECOND)
        assert everywhere(service, "sale") == {there}, second
        got = service.item("sale")
        assert (got.available_from, got.expires_at) == (at(10), at(20))
        (listed,) = service.catalog.page(ItemsQuery(ids=["sale"])).items
        assert (listed.available_from, listed.expires_at) == (at(10), at(20))


@pytest.mark.parametrize("many", [False, True])
def test_drawn_times_and_moments(tmp_path, monkeypatch, many):
    """At every moment the answers have exactly the items that are inside their times."""
    if many:  # the way of catalogues with very many hidden items
        monkeypatch.setattr(snapshot_module, "MAX_HIDDEN_LISTED", 3)
    draw = np.random.default_rng(many)
    with opened(tmp_path) as service:
        clock = Clock(service)
        names = base_of(service).items.ids
        times = {name: (None, None) for name in names}
        hidden = set()
        for _ in range(8):
            for name in draw.choice([*names, "n0", "n1", "n2"], 15, replace=False).tolist():
                first, length = (
                    int(draw.integers(-50, 50)) if draw.random() < 0.6 else None for _ in "ab"
                )
                last = None if length is None else (first or 0) + abs(length) + 1
                times[name] = first, last
                hidden.discard(name)
                texts = [None if second is None else at(second) for second in (first, last)]
                own = {"available_from": texts[0], "expires_at": texts[1]}
                body = (
                    {"item_id": name, **own} if name in names else item_like(service, name, **own)
                )
                assert not put(service, body).rejected
            gone = str(draw.choice(names))
            if gone not in hidden:
                service.hide_item(gone)
                hidden.add(gone)
            clock.now_us += int(draw.integers(0, 12 * SECOND))
            now = (clock.now_us - NOW) / SECOND
            inside = {
                name
                for name, (first, last) in times.items()
                if (first is None or first <= now) and (last is None or now < last)
            } - hidden
            some = {"in": ["item_id", draw.choice(names, 100, replace=False).tolist()]}
            for strategy in ("beam", "speculative", "popular", "latest"):
                assert ids(slate(service, strategy=strategy)) == inside
                filtered = ids(slate(service, strategy=strategy, filter=some))
                assert filtered == inside & set(some["in"][1])
        assert service.recommender.illegal_items == 0


def test_no_request_pays_for_items_without_times(service, monkeypatch):
    """The clock is not even read."""
    put(service, item_like(service, "plain"))
    service.catalog.clock = None
    assert "plain" in ids(slate(service))


def test_times_are_kept_changed_and_removed(service):
    Clock(service)
    put(service, item_like(service, "sale", expires_at=at(-1)))
    assert "sale" not in ids(slate(service))
    put(service, {"item_id": "sale", "title": "Still over"})
    assert service.item("sale").expires_at == at(-1) and "sale" not in ids(slate(service))
    put(service, {"item_id": "sale", "expires_at": at(60)})
    assert "sale" in ids(slate(service))
    version = service.catalog.current.items.name
    put(service, {"item_id": "sale", "expires_at": None})
    answer = service.item("sale")
    assert not answer.expires_at and "sale" in ids(slate(service))
    service.rollback_items(RollbackRequest(catalog_version=version))
    assert service.item("sale").expires_at == at(60)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"available_from": "9999-12-31T00:00:00Z"}, "or null for no time, got 9999"),
        ({"available_from": at(5), "expires_at": at(5)}, "expected a time after available_from"),
        ({"expires_on": at(5)}, "did you mean expires_at"),
    ],
)
def test_a_wrong_time_is_refused_by_name(service, fields, reason):
    answer = put(service, item_like(service, "odd", **fields))
    assert answer.inserted == 0 and reason in answer.rejected[0].reason


def test_times_are_filtered_by(service):
    Clock(service)
    put(service, item_like(service, "old", available_from=at(-900)), item_like(service, "none"))
    put(service, item_like(service, "new", available_from=at(-9), expires_at=at(60)))
    recent = {"range": ["available_from", at(-10), None]}
    assert ids(slate(service, filter=recent)) == {"new"}
    assert ids(slate(service, filter={"range": ["expires_at", None, at(61)]})) == {"new"}


def test_a_journal_keeps_times(tmp_path):
    with opened(tmp_path) as service:
        first = Clock(service)
        put(service, item_like(service, "sale", available_from=at(-3), expires_at=at(20)))
        put(service, item_like(service, "later"))
        assert newest(service)[:2] == [
            "later",
            "sale",
        ]
    with opened(tmp_path) as service:
        second = Clock(service)
        second.now_us = first.now_us + 10 * SECOND
        assert service.catalog.current.until_us is not None
        assert newest(service)[:2] == [
            "later",
            "sale",
        ]
        second.now_us += 10 * SECOND
        assert newest(service)[:1] == ["later"]
        assert "sale" not in ids(slate(service))


def test_an_event_for_an_item_that_ended_is_stored(service):
    clock = Clock(service)
    put(service, item_like(service, "sale", expires_at=at(5)))
    clock.now_us += 6 * SECOND
    events = [{"user_id": "me", "item_id": "sale"}]
    assert service.add_events({"events": events}).accepted == 1
    assert [event.item_id for event in service.history("me").events] == ["sale"]
    assert "cold_start" not in service.recommend({"user": {"id": "me"}}).degraded


def test_a_fold_keeps_items_that_begin_later(service, monkeypatch):
    clock = Clock(service)
    monkeypatch.setattr("recserve.service.live_catalog.MAX_INSERTED", 4)
    put(service, item_like(service, "later", available_from=at(5)))
    put(service, *(item_like(service, f"n{number}", like=number) for number in range(8)))
    service.catalog._folding.join()
    assert "later" not in ids(slate(service))
    clock.now_us += 5 * SECOND
    assert everywhere(service, "later") == {True}


def test_another_bundle_gets_the_times(tmp_path):
    with opened(tmp_path) as service:
        Clock(service)
        put(service, item_like(service, "sale", expires_at=at(20)), item_like(service, "plain"))
        before = service.catalog.current.items.times
        bundle = Bundle.open(shared_bundle())
        bundle.verify()
        options = ServiceOptions(journal=tmp_path / "other")
        with open_successor(service, bundle, "cpu", options) as new:
            clock = Clock(new)
            hand_over(service, new, lambda: None)
            assert new.item("sale").expires_at == at(20)
            after = new.catalog.current.items.times
            assert sorted(after.added.tolist()) == sorted(before.added.tolist())
            clock.now_us += 20 * SECOND
            assert ids(slate(new)) - ids(slate(new, filter={"in": ["item_id", ["plain"]]}))
            assert "sale" not in ids(slate(new)) and "plain" in ids(slate(new))
            service.close()


def test_a_bundle_without_an_item_that_may_be_shown_answers_its_probe(service, monkeypatch):
    """It may be prepared for tomorrow."""
    monkeypatch.setattr(type(service), "samples", lambda *_: {"users": [], "items": []})
    probe(service)


@pytest.fixture(scope="module")
def timed_bundle(tmp_path_factory):
    """A bundle whose items file has times: row 0 has ended, row 1 begins later, row 2 is inside."""
    folder = tmp_path_factory.mktemp("timed")
    files = write_synthetic(folder / "data", SyntheticOptions(500, 30, 12, seed=3))
    table = pq.read_table(files.items)
    rest = [None] * (table.num_rows - 3)
    kind = pa.timestamp("ms", "UTC")
    starts = pa.array([None, (NOW // 1000) + 5000, (NOW // 1000) - 5000, *rest], kind)
    ends = pa.array([(NOW // 1000) - 5000, None, (NOW // 1000) + 9000, *rest], kind)
    table = table.append_column("available_from", starts).append_column("expires_at", ends)
    pq.write_table(table, files.items)
    shape = {"levels": 2, "codes": 16, "text_dim": 16, "collaborative_dim": 0}
    out = folder / "bundle"
    build_bundle(BuildOptions(files.items, files.events, out, **shape), log=lambda _: None)
    return with_models(out)


def test_the_items_file_has_times(timed_bundle, tmp_path):
    options = ServiceOptions(journal=tmp_path / "items")
    with Service.open(timed_bundle, f"lmdb:{tmp_path}/store", "cpu", options) as service:
        ended, later, inside = base_of(service).items.ids[:3]
        clock = Clock(service)
        expected = {-10: (1, 0, 0), -5: (0, 0, 1), 5: (0, 1, 1), 9: (0, 1, 0)}
        for second, there in expected.items():
            clock.now_us = NOW + second * SECOND
            found = [everywhere(service, name) for name in (ended, later, inside)]
            assert found == [{bool(one)} for one in there], second
        assert service.item(inside).available_from == at(-5)
        assert newest(service)[:2] == [later, base_of(service).items.ids[-1]]


def drawn_times(draw, place):
    """Times of an item that may be shown now, in any precision; either may be missing."""
    seconds = NOW // SECOND
    first = draw.choice([None, draw.randrange(10**9, seconds) + draw.choice([0, 0.25, 1e-6])])
    last = draw.choice([None, format_time((seconds + 10**6 + place) * SECOND + draw.randrange(9))])
    return {"available_from": first, "expires_at": last}


def test_answers_show_the_times_that_a_lookup_shows(timed_bundle, tmp_path):
    """`fields` of slates, lists, rankings and jobs: the bundle's items, new and changed ones."""
    draw = random.Random(5)
    options = ServiceOptions(journal=tmp_path / "items")
    store = f"lmdb:{tmp_path}/store"
    names = ["expires_at", "title", "available_from"]
    with Service.open(timed_bundle, store, "cpu", options) as service:
        Clock(service)
        known = base_of(service).items.ids[2:12]
        fresh = [f"new-{place}" for place in range(9)]
        changed = [
            item_like(service, name, **drawn_times(draw, place)) for place, name in enumerate(fresh)
        ]
        changed += [{"item_id": name, **drawn_times(draw, 20)} for name in known[4:]]
        put(service, *changed)
        asked = [*known, *fresh]

        def check(items):
            assert items
            for item in items:
                found = service.item(item.item_id)
                expected = {name: getattr(found, name) or None for name in names}
                assert item.fields == expected, item
                assert list(item.fields) == names

        body = {"history": known[:3], "k": 700, "beam_width": 700, "fields": names}
        for strategy in ("beam", "nezha", "popular", "latest"):
            answer = service.recommend({**body, "strategy": strategy, "exclude": {"seen": False}})
            assert set(asked) <= ids(answer)
            check(answer.items)
        ranked = service.rank({"history": known[:3], "candidates": asked, "fields": names})
        assert len(ranked.items) == len(asked)
        check(ranked.items)
        page = service.items({"ids": asked})
        times = [(one.available_from, one.expires_at) for one in page.items]
        single = [service.item(name) for name in asked]
        assert times == [(one.available_from, one.expires_at) for one in single]
        assert len(set(times)) > 9
    recipe = SlateRecipe(str(timed_bundle), Defaults(k=40, fields=tuple(names)), store)
    with recipe.open() as task:
        rows = task(pa.table({"user_id": ["nobody"]}), 0).answers
    assert rows.schema.field("fields").type.field("expires_at").type == pa.timestamp("us", "UTC")
    assert len(rows) == 40
