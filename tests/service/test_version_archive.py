"""Which versions of a live catalogue can be restored, by a clock of our own; and that they are."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from recserve.features.catalog.versions import difference
from recserve.schemas.items import RollbackRequest
from recserve.service import live_catalog, version_archive
from recserve.service.errors import UnknownVersion
from recserve.service.version_archive import (
    MAX_NEWEST,
    MAX_OLDER,
    MIN_INTERVAL_S,
    VersionArchive,
)
from tests.support.grids import chosen
from tests.support.live_catalogues import base_of, item_like, put, scores, slate


class Base:
    """A trie, as far as it is kept or not."""


def version(number):
    return SimpleNamespace(name=f"v.{number}" if number else "v", number=number, epoch=0)


def filled(count, every_s):
    """Versions 1 to count, one every so many seconds, each over a base of its own."""
    clock = [0.0]
    kept = VersionArchive(version(0), Base(), lambda: clock[0], lambda items: items)
    bases = []
    for number in range(1, count + 1):
        clock[0] += every_s
        base = Base()
        bases.append(weakref.ref(base))
        kept.add(version(number), base)
    return kept, bases


def there(kept, count):
    found = []
    for number in range(count + 1):
        with contextlib.suppress(UnknownVersion):
            found.append(kept.get(version(number).name).items.number)
    return found


@pytest.mark.parametrize("every_s", chosen((0.1, 7.0, 61.0, 3600.0), "7.0"))
def test_dense_near_now_and_sparse_further_back(every_s):
    count = 1500
    kept, bases = filled(count, every_s)
    numbers = there(kept, count)
    assert numbers[0] == 0 and numbers[-MAX_NEWEST:] == list(
        range(count - MAX_NEWEST + 1, count + 1)
    )
    further = np.array(numbers[1:-MAX_NEWEST])
    assert len(further) <= MAX_OLDER and len(kept) == len(numbers)
    gaps = np.diff(further) * every_s
    assert (gaps >= MIN_INTERVAL_S - 1e-6).all() and (gaps < MIN_INTERVAL_S + 2 * every_s).all()
    # What the clock allows is kept: everything back to the bundle, or all the places are taken.
    reach_s = (count - MAX_NEWEST) * every_s
    assert len(further) == min(MAX_OLDER, int(reach_s // max(MIN_INTERVAL_S, every_s)))
    gc.collect()
    assert sum(base() is not None for base in bases) == MAX_NEWEST


def test_the_error_names_the_nearest():
    kept, _ = filled(2000, 0.1)
    with pytest.raises(UnknownVersion, match=r"nearest are v\.599 and v\.1199|nearest are v\.6"):
        kept.get("v.700")
    with pytest.raises(UnknownVersion, match=r"nearest are v\.2000$"):
        kept.get("v.5000")
    for name in ("other", "w.3", "v.x", "v.-1", "v." + "9" * 80, ""):
        with pytest.raises(UnknownVersion) as error:
            kept.get(name)
        assert len(str(error.value)) < 220


def test_a_version_of_long_ago_is_restored_over_the_bundle_s_trie(service, monkeypatch):
    """Behind a fold, whose base it does not hold; items come, go and move in between."""
    monkeypatch.setattr(version_archive, "MAX_NEWEST", 1)
    monkeypatch.setattr(version_archive, "MIN_INTERVAL_S", 0.0)
    ids = base_of(service).items.ids
    put(service, *[item_like(service, f"a{n}", 7 * n) for n in range(4)])
    wanted = put(service, {"item_id": ids[2], "embedding": base_of(service).vectors[9].tolist()})
    expected = scores(slate(service))
    monkeypatch.setattr(live_catalog, "MAX_INSERTED", 5)
    put(service, *[item_like(service, f"b{n}", 5 * n) for n in range(4)])
    service.catalog._folding.join()
    service.hide_item("a1")
    folded = service.catalog.current.base_trie
    answer = service.rollback_items(RollbackRequest(catalog_version=wanted.catalog_version))
    assert answer.restored == wanted.catalog_version
    assert service.catalog.current.base_trie is not folded
    assert scores(slate(service)) == pytest.approx(expected, abs=1e-5)
    put(service, item_like(service, "c"))
    assert set(scores(slate(service))) == set(expected) | {"c"}


def test_a_version_of_long_ago_holds_no_record_that_was_replaced(service, monkeypatch):
    monkeypatch.setattr(version_archive, "MAX_NEWEST", 1)
    monkeypatch.setattr(version_archive, "MIN_INTERVAL_S", 0.0)
    put(service, item_like(service, "a"))
    for number in range(20):
        wanted = put(service, {"item_id": "a", "title": f"title {number}"})
    put(service, {"item_id": "a", "title": "later"})
    archived = service.catalog._archive.get(wanted.catalog_version).items
    assert len(archived.log) == 1 < len(service.catalog.current.items.log)
    service.rollback_items(RollbackRequest(catalog_version=wanted.catalog_version))
    assert service.item("a").title == "title 19"
    put(service, {"item_id": "a", "title": "last"})
    assert service.item("a").title == "last"


def contents(version):
    """What a version changes of its bundle, by item."""
    changed = difference(version)
    records = {change.record.item_id: change.record for change in changed.changes}
    return {**records, **dict.fromkeys(changed.hidden)}


@pytest.mark.parametrize("seed", range(4))
def test_recent_items_are_all_that_changed_since_they_were_cleared(service, seed):
    """Puts, hides and rollbacks back and forth; a replacement carries these items over."""
    drawn, catalog = np.random.default_rng(seed), service.catalog
    since, names = contents(catalog.current.items), [catalog.current.items.name]
    for number in range(30):
        item_id = f"a{drawn.integers(4)}"
        match drawn.choice(["put", "hide", "rollback", "rollback", "clear"]):
            case "put":
                put(service, {**item_like(service, item_id, 7), "title": f"title {number}"})
            case "hide" if catalog.current.items.visible.get(item_id) >= 0:
                service.hide_item(item_id)
            case "rollback":
                service.rollback_items(RollbackRequest(catalog_version=str(drawn.choice(names))))
            case "clear":
                catalog.recent.clear()
                since = contents(catalog.current.items)
        names.append(catalog.current.items.name)
        now = contents(catalog.current.items)
        differing = {item for item in {*since, *now} if since.get(item, 0) != now.get(item, 0)}
        assert differing <= catalog.recent
