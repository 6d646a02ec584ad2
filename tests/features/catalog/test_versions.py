"""Versions against a plain dictionary of items, and ranking tables against tables bound anew."""

import numpy as np
import pyarrow as pa
import pytest

from recserve.features.catalog.catalog import Catalog, item_keys
from recserve.features.catalog.item_records import ItemRecord, check_attributes
from recserve.features.catalog.new_items import IdAssigner
from recserve.features.catalog.semantic_ids import build_semantic_ids
from recserve.features.catalog.versions import (
    ChangeSet,
    ItemChange,
    apply_changes,
    compact_log,
    difference,
    first_version,
    restore_version,
)
from recserve.features.ranking.live_ranking import LiveRanking
from recserve.features.ranking.ranking_tables import RankingSettings, _bind
from recserve.features.tables.arrays import ExtendedArray, GrowableArray, PatchedArray, RowMap
from recserve.features.tables.items import ItemTable
from recserve.features.vectors.quantizer import ResidualQuantizer

PATHS = ["A", "A > B", "C", "C > D"]
ITEMS = 40


def make_catalog():
    draw = np.random.default_rng(1)
    ids = [f"i{row}" for row in range(ITEMS)]
    vectors = draw.standard_normal((ITEMS, 8)).astype(np.float32)
    quantizer = ResidualQuantizer.fit(vectors, (5, 5), 0)
    popularity = draw.integers(0, 30, ITEMS).astype(np.float32)
    index, _ = build_semantic_ids(
        ids, quantizer.encode(vectors), quantizer.codebook_sizes, popularity
    )
    attributes = pa.table({"price": pa.array(draw.random(ITEMS), pa.float64())})
    items = ItemTable(ids, ["t"] * ITEMS, [[PATHS[row % 4]] for row in range(ITEMS)], attributes)
    return Catalog("v", items, index, popularity, vectors), quantizer


def make_tables(catalog):
    settings = RankingSettings(
        *(ITEMS, 8, 4, 2, False, False, 0.0, ("event",), (), None),
        *(tuple(PATHS), (1.0, 2.0, 1.5, 2.5), ("price",), (0.5,), (0.3,)),
    )
    counts = catalog.popularity
    offsets = np.arange(ITEMS + 1)
    arrays = (counts, 2 * counts, offsets, np.roll(offsets[:-1], 1).astype(np.int32), counts)
    return _bind(settings, arrays, catalog.items, catalog.vectors)


class Model:
    """What a catalogue is to a reader, in the plainest form."""

    def __init__(self, catalog):
        items = catalog.items
        self.items = {
            i: (ItemRecord(i, t, c, items.attribute(row)), catalog.vectors[row])
            for row, (i, t, c) in enumerate(
                zip(items.ids, items.titles, items.categories, strict=True)
            )
        }
        self.hidden = set()

    def copy(self):
        new = object.__new__(Model)
        new.items, new.hidden = dict(self.items), set(self.hidden)
        return new


def drawn(steps, seed, timed=False):
    """Versions of drawn change sets, rollbacks and shortened logs among them, with their models."""
    draw = np.random.default_rng(seed)
    catalog, quantizer = make_catalog()
    assigner = IdAssigner(catalog.semantic_ids, quantizer)
    rows = {item_id: row for row, item_id in enumerate(catalog.items.ids)}
    version, model = first_version(catalog, rows), Model(catalog)
    kept = [(version, model)]
    for number in range(1, steps + 1):
        model = model.copy()
        if draw.random() < 0.1:
            there, model = kept[int(draw.integers(len(kept)))]
            version = restore_version(there, version, number)
            kept.append((version, model))
            continue
        names = draw.permutation([*catalog.items.ids, *(f"n{i}" for i in range(15))])[:4].tolist()
        hidden = [n for n in names[:1] if n in model.items and n not in model.hidden]
        puts = [n for n in names if n not in hidden]
        fresh = [
            n for n in puts if n not in model.items or n in model.hidden or draw.random() < 0.4
        ]
        vectors = draw.standard_normal((len(fresh), 8)).astype(np.float32)
        new_ids = assigner.assign(version, vectors, version.known_rows(fresh))
        found = zip(fresh, vectors, new_ids, strict=True)
        places = {n: (vector, new.codes) for n, vector, new in found if new is not None}
        changes = []
        for name in puts:
            if name in fresh and name not in places:
                continue
            path = [PATHS[int(draw.integers(4))]]
            price = {"price": float(draw.random())}
            record = ItemRecord(name, f"t{number}", path, price, *drawn_times(draw, timed))
            changes.append(ItemChange(record, *places.get(name, (None, None))))
            vector = places[name][0] if name in places else model.items[name][1]
            model.items[name] = (record, vector)
            model.hidden.discard(name)
        model.hidden.update(hidden)
        version = apply_changes(version, ChangeSet(number, tuple(changes), tuple(hidden)))
        if draw.random() < 0.1:
            version = compact_log(version)
        kept.append((version, model))
    return kept


def drawn_times(draw, timed):
    first, length, added = (
        int(draw.integers(1, 50)) if draw.random() < 0.5 else None for _ in "abc"
    )
    last = None if length is None else (first or 0) + length
    return (first, last, added) if timed else ()


@pytest.fixture(scope="module", params=range(4))
def history(request):
    return drawn(120, request.param)


def test_every_version_is_its_model_to_the_end(history):
    for version, model in history:
        shown = [n for n in model.items if n not in model.hidden]
        rows = version.visible.get_many(shown)
        assert min(rows) >= 0 and len(set(rows)) == len(rows)
        assert version.visible.get_many([*model.hidden, "none"]) == [-1] * (len(model.hidden) + 1)
        known = version.rows_of_keys(item_keys(list(model.items)))
        for name, row in zip(model.items, known.tolist(), strict=True):
            record, vector = model.items[name]
            assert version.item_id(row) == name and version.known_rows([name]) == [row]
            assert version.record(row) == record
            assert np.array_equal(version.vectors[row], vector)
            assert version.is_removed(row) == (name in model.hidden)
        assert not np.isin(rows, version.removed_rows).any()
        codes = version.codes[np.array(rows)]
        assert len(np.unique(codes, axis=0)) == len(rows)
        # All rows are somebody's, or removed.
        assert sorted([*rows, *version.removed_rows.tolist()]) == list(range(version.num_rows))


def test_the_difference_from_the_bundle_makes_the_version_again(history):
    catalog = history[0][0].base
    for version, model in history[::7]:
        rows = {item_id: row for row, item_id in enumerate(catalog.items.ids)}
        again = first_version(catalog, rows)
        for part in difference(version).split():
            again = apply_changes(again, part)
        assert again.name == version.name and again.num_rows <= version.num_rows
        owned = again.codes[again.owning]
        assert len(np.unique(owned, axis=0)) == len(owned)
        for name, (record, vector) in model.items.items():
            (row,) = again.known_rows([name])
            (old,) = version.known_rows([name])
            assert (again.visible.get(name) >= 0) == (name not in model.hidden)
            assert again.record(row) == record and np.array_equal(again.vectors[row], vector)
            assert again.codes[row].tolist() == version.codes[old].tolist()
            assert again.trained_row(row) == version.trained_row(old)


def test_counts_follow_their_items(history):
    """Events of an item count for it in every version, whatever rows the item has had."""
    last = history[-1][0]
    for version, model in history[::10]:
        shown = [n for n in model.items if n not in model.hidden]
        rows = version.present_rows(np.arange(last.num_rows))
        assert sorted(version.item_id(row) for row in rows.tolist()) == sorted(shown)
        first = version.first_rows(version.rows_of_keys(item_keys(shown)))
        assert version.present_rows(first).tolist() == version.visible.get_many(shown)
        bundled = np.array([n[0] == "i" for n in shown])
        names_of = [f"i{row}" for row in first[bundled].tolist()]
        assert names_of == [n for n in shown if n[0] == "i"]


def test_the_newest_items_come_first():
    """Beside a plain sort, for every version and number of items."""
    for version, model in drawn(120, 5, timed=True)[::10]:
        rows = version.newest(version.num_rows)
        shown = rows[~version.are_removed(rows)].tolist()
        assert sorted(version.item_id(row) for row in shown) == sorted(
            model.items.keys() - model.hidden
        )
        records = [model.items[version.item_id(row)][0] for row in shown]
        ages = [
            (r.available_from or r.added_at or 0, row)
            for r, row in zip(records, shown, strict=True)
        ]
        assert ages == sorted(ages, reverse=True)
        for count in (1, 3, 17):
            assert version.newest(count).tolist() == rows[:count].tolist()


def test_ids_are_those_of_the_quantiser_where_there_is_room(history):
    version, model = history[-1]
    _, quantizer = make_catalog()
    rows = np.array(version.visible.get_many([n for n in model.items if n not in model.hidden]))
    wanted = quantizer.encode(version.vectors[rows])
    same = (version.codes[rows][:, :2] == wanted).all(1)
    assert same.mean() > 0.7 and (version.codes[rows][:, 0] == wanted[:, 0]).all()


def test_ranking_tables_are_those_of_a_catalogue_bound_anew(history):
    """Old versions' tables stay what they were while later versions are made."""
    catalog, _ = make_catalog()
    base = make_tables(catalog)
    live = LiveRanking(base)
    made = [live.at(version) for version, _ in history]
    for (version, model), tables in zip(history, made, strict=True):
        names = list(model.items)
        rows = version.rows_of_keys(item_keys(names))
        records = [model.items[name][0] for name in names]
        numbers = [PATHS.index(record.categories[0]) for record in records]
        assert tables.num_items == version.num_rows
        deepest = tables.categories[rows][:, 0]
        assert deepest.tolist() == numbers
        price = [(record.attributes["price"] - 0.5) / 0.3 for record in records]
        np.testing.assert_allclose(tables.side[rows][:, 0], price, rtol=1e-5)
        learned = [int(name[1:]) if name[0] == "i" else -1 for name in names]
        counts = [catalog.popularity[row] if row >= 0 else 0 for row in learned]
        assert tables.item_counts[rows].tolist() == counts
        assert tables.value_sums[rows].tolist() == [2 * c for c in counts]
        fitted = tables.fitted_rows(rows)
        assert fitted.tolist() == [b if b >= 0 else r for b, r in zip(learned, rows, strict=True)]
        starts, lengths = tables.neighbour_ranges(fitted)
        assert lengths.tolist() == [int(b >= 0) for b in learned]
        vectors = np.stack([model.items[name][1] for name in names])
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(tables.vectors[rows], unit, rtol=1e-5)


def test_ranking_tables_follow_changes_without_a_new_row():
    (version, _), *_ = drawn(0, 0)
    live, rows = LiveRanking(make_tables(version.base)), np.arange(2)
    before = live.at(version)
    change = ItemChange(ItemRecord("i0", "t", ["C > D"], {"price": 0.8}))
    after = live.at(apply_changes(version, ChangeSet(1, (change,))))
    assert after.categories[rows][:, 0].tolist() == [PATHS.index("C > D"), PATHS.index("A > B")]
    np.testing.assert_allclose(after.side[rows][:, 0], [1.0, before.side[1][0]], rtol=1e-5)
    assert before.categories[rows][:, 0].tolist() == [0, 1]


def test_unknown_items_are_refused_before_anything_changes():
    (version, _), *_ = drawn(0, 0)
    new = ItemChange(ItemRecord("new", "", [], {}))
    with pytest.raises(ValueError, match="new and has no vector"):
        apply_changes(version, ChangeSet(1, (new,)))
    assert not version.log.records and not version.tail.ids


def test_a_hidden_item_that_is_unknown_is_remembered():
    (version, _), *_ = drawn(0, 0)
    hidden = apply_changes(version, ChangeSet(1, hidden=("none",)))
    assert difference(hidden).hidden == ("none",)
    assert hidden.num_rows == version.num_rows and not hidden.removed_rows.size
    catalog, quantizer = make_catalog()
    vectors = np.ones((1, 8), np.float32)
    (new,) = IdAssigner(catalog.semantic_ids, quantizer).assign(hidden, vectors, [-1])
    change = ItemChange(ItemRecord("none", "", [], {}), vectors[0], new.codes)
    put = apply_changes(hidden, ChangeSet(2, (change,)))
    assert put.visible.get("none") >= 0 and difference(put).hidden == ()


def test_equal_ids_are_refused():
    catalog, _ = make_catalog()
    catalog.items.ids[7] = "i3"
    with pytest.raises(ValueError, match="item 'i3' occurs twice"):
        Catalog("v", catalog.items, catalog.semantic_ids, catalog.popularity, catalog.vectors)


def test_two_ids_of_one_key_are_refused(monkeypatch):
    (version, _), *_ = drawn(0, 0)
    monkeypatch.setattr(
        "recserve.features.catalog.catalog.item_key", lambda _: int(version.base.keys[3])
    )
    with pytest.raises(ValueError, match="'other' and 'i3' have the same 64-bit key"):
        version.known_rows(["i5", "other"])


def test_a_full_neighbourhood_sends_an_item_farther_away():
    """No item is refused because of its neighbours, only where no id is left at all."""
    catalog, quantizer = make_catalog()
    rows = {item_id: row for row, item_id in enumerate(catalog.items.ids)}
    version, assigner = first_version(catalog, rows), IdAssigner(catalog.semantic_ids, quantizer)
    near = catalog.semantic_ids.codebook_sizes[-1] * quantizer.codebook_sizes[-1]
    free = int(np.prod(catalog.semantic_ids.codebook_sizes)) - ITEMS
    same = np.repeat(catalog.vectors[:1], free + 1, axis=0)
    new_ids = assigner.assign(version, same, [-1] * len(same))
    found = [tuple(new.codes.tolist()) for new in new_ids if new is not None]
    taken = {tuple(c) for c in catalog.semantic_ids.codes.tolist()}
    assert new_ids[-1] is None and len(set(found)) == len(found) == free and not set(found) & taken
    first = int(quantizer.encode(same[:1])[0, 0])
    here = near - sum(c[0] == first for c in taken)
    assert {c[0] for c in found[:here]} == {first} and first not in {c[0] for c in found[here:]}
    far = [new.is_far for new in new_ids if new is not None]
    assert far == [False] * here + [True] * (free - here)


def test_attributes_take_the_types_of_the_columns():
    schema = pa.schema([("price", pa.float32()), ("tags", pa.list_(pa.string())), ("n", pa.int8())])
    given = {"price": 3, "tags": ["a"], "n": None}
    assert check_attributes(given, schema) == {"price": 3.0, "tags": ["a"]}
    for wrong in ({"price": "x"}, {"tags": "a b"}, {"n": 300}, {"n": 1.5}, {"price": True}):
        with pytest.raises(ValueError, match="expected"):
            check_attributes(wrong, schema)
    with pytest.raises(ValueError, match="did you mean price"):
        check_attributes({"prise": 3}, schema)


def test_row_map_layers():
    rows = RowMap({n: n for n in range(10)})
    for step in range(3000):
        rows = rows.with_rows({step % 50 + 5: step, -step: -1})
    assert rows.get_many([1, 12, 5, -7, 99]) == [1, 2957, 2950, -1, -1]
    assert [rows.get(k) for k in (1, 12, 5, -7, 99)] == [1, 2957, 2950, -1, -1]
    assert RowMap({1: 1}).with_rows({1: 2}).base == {1: 1}


def test_growing_tables_are_arrays_to_their_readers():
    base, draw = np.arange(12.0).reshape(4, 3), np.random.default_rng(0)
    tail, views = GrowableArray((3,), np.float64), []
    for step in range(1, 90):
        tail.append(np.full((step % 3, 3), step))
        views.append((tail.view(tail.count), tail.view(tail.count).copy()))
    assert all(np.array_equal(view, copy) for view, copy in views)
    whole = np.concatenate([base, tail.view(tail.count)])
    extended = ExtendedArray(base, tail.view(tail.count))
    rows, places = np.array([1, 3, 4, 5]), np.array([7, 2, 0, 9])
    patched = PatchedArray(base, 6, rows, places, tail.view(tail.count))
    assert extended.shape == whole.shape and patched.shape == (6, 3)
    for shape in ((), (7,), (2, 5)):
        index = draw.integers(0, len(whole), shape)
        assert np.array_equal(extended[index], whole[index])
        index = draw.integers(0, 6, shape)
        expected = np.concatenate([base, base[:2]])
        expected[rows] = tail.view(tail.count)[places]
        assert np.array_equal(patched[index], expected[index])
