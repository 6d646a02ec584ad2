"""Diversity over a service: what is counted, what fills the slate, and versions that change."""

import shutil
from collections import Counter

import msgspec
import numpy as np
import pytest

from recserve.core.diversity import PrefixGroups
from recserve.features.catalog.item_groups import GroupIndex
from recserve.features.catalog.item_records import RecordLog
from recserve.features.catalog.versions import CatalogVersion
from recserve.schemas.items import (
    Diversity,
    Exclusions,
    InvalidRequest,
    ItemsRequest,
    RecommendRequest,
)
from recserve.service import Service
from tests.support.slates import plain_open
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with Service.open(shared_bundle(), f"lmdb:{store}", "cpu") as opened:
        yield opened


def caps_in(snapshot, **diversity):
    return snapshot.caps(Diversity(**diversity))


def assert_grouped(cap, names):
    """names [I]: the names of each item's groups; what the groups are numbered does not matter."""
    places, groups = cap.groups.of(np.arange(len(names)))
    found = []
    for group in np.unique(groups):
        rows = np.flatnonzero(np.isin(np.arange(len(names)), places[groups == group])).tolist()
        assert rows == sorted(places[groups == group].tolist())  # each once
        assert sorted(set(cap.groups.items(np.array([group])).tolist())) == rows
        found.append(rows)
    by_name = {}
    for row, own in enumerate(names):
        for name in set(own):
            by_name.setdefault(name, []).append(row)
    assert sorted(found) == sorted(by_name.values())
    assert cap.groups.items(np.array([], dtype=np.int64)).size == 0


def test_groups_are_categories_and_prefixes(service):
    snapshot = service.catalog.current
    categories, codes = snapshot.catalog.items.categories, snapshot.catalog.semantic_ids.codes
    kinds = [("prefix", (level, 3)) for level in range(codes.shape[1])] + [("category", 2)]
    for kind, asked in kinds:
        (cap,) = caps_in(snapshot, **{kind: asked})
        names = categories
        if kind == "prefix":
            names = [[tuple(code[: asked[0] + 1])] for code in codes.tolist()]
        assert_grouped(cap, names)
    with pytest.raises(
        InvalidRequest, match=f"expected a level of 0 to {codes.shape[1] - 1}, got 9"
    ):
        caps_in(snapshot, prefix=(9, 1))
    assert caps_in(snapshot) == ()


@pytest.mark.parametrize("history", ["known", "none"])
def test_slates_keep_to_the_caps_filled_places_too(service, history):
    catalog = service.catalog.current.catalog
    ids = catalog.items.ids
    rows = {item: row for row, item in enumerate(ids)}
    body = {
        "history": ids[:4] if history == "known" else ["gone"],
        "exclude": Exclusions(seen=False),
    }
    answer = service.recommend(
        RecommendRequest(**body, k=30, diversity=Diversity(category=1, prefix=(0, 4)))
    )
    found = [rows[item.item_id] for item in answer.items]
    assert len(set(found)) == 30 and "fewer_than_k" not in answer.degraded
    paths = Counter(path for row in found for path in catalog.items.categories[row])
    first = Counter(catalog.semantic_ids.codes[row][0] for row in found)
    assert max(paths.values()) == 1 and max(first.values()) <= 4
    sources = [item.source for item in answer.items]
    assert sources == sorted(sources)  # model before popular
    total = len({path for found in catalog.items.categories for path in found})
    every = service.recommend(RecommendRequest(**body, k=500, diversity=Diversity(category=1)))
    assert len(every.items) <= total and "fewer_than_k" in every.degraded


@pytest.fixture
def changing(tmp_path):
    shutil.copytree(shared_bundle(), tmp_path / "bundle")
    with Service.open(tmp_path / "bundle", f"lmdb:{tmp_path}/store", "cpu") as opened:
        yield opened


def test_groups_of_a_live_catalogue(changing):
    """Categories and prefixes as they are now, of changed, new and old items; an older version
    stays what it was.
    """
    service, before = changing, changing.catalog.current
    ids = before.catalog.items.ids
    old = [list(paths) for paths in before.catalog.items.categories]
    said = {ids[3]: ["One > Only"], ids[5]: old[7], ids[8]: [], "new-1": ["One > Only", *old[2]]}
    for number in range(2):  # the second time others move too
        items = [{"item_id": i, "title": "x", "categories": c} for i, c in said.items()]
        if number:
            items = [{"item_id": ids[3], "title": "y", "categories": old[3]}]
        service.put_items(ItemsRequest(items=items))
    service.hide_item(ids[9])
    now = service.catalog.current
    assert now.trie.insertions is not None
    names = [list(now.items.record(row).categories) for row in range(now.num_items)]
    assert names[3] == old[3] and names[5] == old[7] and "One > Only" in names[-1]
    for snapshot, wanted in ((now, names), (before, old)):
        (cap,) = caps_in(snapshot, category=1)
        assert_grouped(cap, wanted)
    for level in range(now.trie.num_levels):
        (cap,) = caps_in(now, prefix=(level, 1))
        rows = np.delete(np.arange(now.num_items), now.items.removed_rows)
        alike = [tuple(now.items.codes[row][: level + 1].tolist()) for row in rows]
        groups = cap.groups.of(rows)[1]
        for group in np.unique(groups):
            (name,) = {alike[place] for place in np.flatnonzero(groups == group)}
            mine = {row for row, other in zip(rows.tolist(), alike, strict=True) if other == name}
            found = set(cap.groups.items(np.array([group])).tolist())
            assert found - set(now.items.removed_rows.tolist()) == mine


def test_slates_of_a_live_catalogue(changing):
    service, ids = changing, changing.catalog.current.catalog.items.ids
    rng = np.random.default_rng(0)
    for number in range(3):
        items = [
            {"item_id": f"new-{number}-{n}", "title": f"quiet lamp {n}", "categories": ["A > B"]}
            for n in range(3)
        ]
        moved = rng.choice(ids, 20, replace=False).tolist()
        items += [{"item_id": i, "title": "x", "categories": ["One > Only"]} for i in moved]
        service.put_items(ItemsRequest(items=items))
        service.hide_item(ids[number])
        for diversity in (Diversity(category=1), Diversity(prefix=(1, 1), category=2)):
            body = RecommendRequest(
                history=ids[4:8], k=12, beam_width=12, exclude=Exclusions(seen=False),
                diversity=diversity,
            )  # fmt: skip
            answers = [service.recommend(replace_strategy(body, name)) for name in ("beam", "auto")]
            for answer in answers:
                found = [service.item(item.item_id) for item in answer.items]
                paths = Counter(path for item in found for path in item.categories)
                assert max(paths.values()) <= diversity.category
                assert len(found) == len({item.item_id for item in found})
                snapshot = service.catalog.current
                caps = caps_in(snapshot, category=diversity.category, prefix=diversity.prefix)
                own = [i.item_id for i in answer.items if i.source == "model"]
                if len(own) < 12:
                    rows = snapshot.rows_of(own)
                    legal = np.delete(
                        np.arange(snapshot.num_items), snapshot.items.removed_rows
                    ).tolist()
                    assert plain_open(rows, caps, legal) == []


def replace_strategy(body, strategy):
    return msgspec.structs.replace(body, strategy=strategy)


def test_a_new_version_groups_only_what_is_asked_about(changing, monkeypatch):
    """Of the catalogue nothing, of its changes each once, whatever the number of versions."""
    service, ids = changing, changing.catalog.current.catalog.items.ids
    prefixes, records, listed = [], [], []
    counted(monkeypatch, PrefixGroups, "of", lambda groups, rows: prefixes.append(rows.size))
    counted(monkeypatch, CatalogVersion, "record", lambda version, row: records.append(row))
    counted(monkeypatch, GroupIndex, "of_members", lambda _, items: listed.append(items))
    looked_at = []
    counted(
        monkeypatch,
        RecordLog,
        "_build_filters",
        lambda _, first, count: looked_at.extend(range(first, first + count)),
    )
    body = RecommendRequest(
        history=ids[4:8], k=6, beam_width=6, exclude=Exclusions(seen=False),
        diversity=Diversity(category=1, prefix=(0, 1)),
    )  # fmt: skip
    for number in range(6):
        items = [{"item_id": i, "title": f"{number}", "categories": ["One"]} for i in ids[20:60]]
        service.put_items(ItemsRequest(items=items))
        prefixes.clear(), records.clear()
        service.recommend(body)
        assert prefixes and max(prefixes) <= 12 and len(records) <= 60
    assert listed == [len(ids)]
    assert looked_at == list(range(6 * 40))


def counted(monkeypatch, owner, name, note):
    plain = getattr(owner, name)

    def noting(*given):
        note(*given)
        return plain(*given)

    static = isinstance(vars(owner)[name], staticmethod)
    monkeypatch.setattr(owner, name, staticmethod(noting) if static else noting)
