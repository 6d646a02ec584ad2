"""A build on an older bundle: ids stay what they were, live items come along, new ones fit in."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle, BundleError
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.schemas.items import ItemsRequest
from recserve.service import Service, ServiceOptions


def codes_of(bundle):
    catalog = bundle.catalog()
    codes = catalog.semantic_ids.codes.tolist()
    return dict(zip(catalog.items.ids, map(tuple, codes), strict=True))


@pytest.mark.parametrize("collaborative", [0, 16])
def test_ids_stay_and_live_items_are_in_the_new_bundle(tmp_path, collaborative):
    files = write_synthetic(tmp_path / "data", SyntheticOptions(500, 40, 12, seed=3))
    options = BuildOptions(
        files.items,
        files.events,
        tmp_path / "old",
        levels=2,
        codes=8,
        text_dim=16,
        collaborative_dim=collaborative,
    )
    build_bundle(options, log=lambda _: None)
    old = Bundle.open(tmp_path / "old")
    journal = tmp_path / "items"
    settings = ServiceOptions(journal=journal)
    with Service.open(tmp_path / "old", f"lmdb:{tmp_path}/store", "cpu", settings) as service:
        ids = old.catalog().items.ids
        service.put_items(
            ItemsRequest(items=[{"item_id": f"live{n}", "title": f"Lamp {n}"} for n in range(3)])
        )
        service.hide_item("live2")
        service.hide_item(ids[5])
        items = service.catalog.current.items
        rows = items.known_rows(["live0", "live1"])
        live = {f"live{n}": tuple(items.codes[row].tolist()) for n, row in enumerate(rows)}
        event = {"user_id": "anna", "item_id": "live0", "timestamp": "2026-11-20T08:00:00Z"}
        service.add_events({"events": [event]})
    table = pq.read_table(files.items)
    more = table.slice(0, 2).set_column(0, "item_id", pa.array(["new0", "new1"]))
    pq.write_table(pa.concat_tables([table.slice(3), more]), tmp_path / "items.parquet")
    events = pq.read_table(files.events)
    gone = set(table.column("item_id")[:3].to_pylist())
    kept = [item not in gone for item in events.column("item_id").to_pylist()]
    pq.write_table(events.filter(pa.array(kept)), tmp_path / "events.parquet")
    following = replace(
        options,
        items=tmp_path / "items.parquet",
        events=tmp_path / "events.parquet",
        out=tmp_path / "new",
        ids_from=tmp_path / "old",
        journal=journal,
        codes=16,  # that of the older bundle counts
    )
    build_bundle(following, log=lambda _: None)
    new = Bundle.open(tmp_path / "new")
    before, after = codes_of(old), codes_of(new)
    assert set(after) == (set(before) - gone) | {"live0", "live1", "live2", "new0", "new1"}
    assert all(after[item] == codes for item, codes in before.items() if item in after)
    assert {item: after[item] for item in live} == live
    assert len(set(after.values())) == len(after)
    was, now = old.catalog(), new.catalog()
    place = {item: row for row, item in enumerate(was.items.ids)}
    for row, item in enumerate(now.items.ids):
        if item in place:
            assert np.array_equal(now.vectors[row], was.vectors[place[item]])
    # Live items of the new bundle get ids as those of the old one.
    with Service.open(tmp_path / "new", f"lmdb:{tmp_path}/other", "cpu") as service:
        service.put_items(ItemsRequest(items=[{"item_id": "later", "title": "Lamp"}]))


def test_journals_need_their_bundle(tmp_path):
    with pytest.raises(ValueError, match="set ids_from"):
        BuildOptions(tmp_path / "i", tmp_path / "e", tmp_path / "o", journal=tmp_path)
    with pytest.raises(BundleError):
        files = write_synthetic(tmp_path / "data", SyntheticOptions(500, 20, 8, seed=3))
        build_bundle(
            BuildOptions(files.items, files.events, tmp_path / "o", ids_from=tmp_path / "none")
        )
