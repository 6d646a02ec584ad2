"""A bundle is replaced by another one: item changes, histories and tokens survive."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recserve.bundle.bundle import Bundle, BundleError
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import ItemsRequest, RecommendRequest, UserRef
from recserve.service import Service, ServiceOptions
from recserve.service import memory as memory_module
from recserve.service.attribution import Signer
from recserve.service.errors import UnknownItem
from recserve.service.memory import needed_bytes
from recserve.service.replacement import (
    NICENESS,
    UnfitBundle,
    at_low_priority,
    check_successor,
    hand_over,
    open_successor,
)
from tests.support.bundle_shelf import DROPPED, shelf


class Shelf:
    """Opens bundles one after the other, as a server does."""

    def __init__(self, folder: Path) -> None:
        self.folder = shelf(folder)
        self.options = ServiceOptions(
            engine=EngineConfig(kv_bytes=2**22), journal=self.folder / ".items"
        )
        store = f"lmdb:{folder}/history"
        self.current = Service.open(self.folder / "one", store, "cpu", self.options)

    def to(self, name: str, override: bool = False, close: bool = True) -> Service:
        old = self.current
        self.current = open_successor(old, Bundle.open(self.folder / name), "cpu", self.options)
        hand_over(old, self.current, lambda: None, override)
        if close:
            old.close()
        return self.current


@pytest.fixture
def bundles(tmp_path: Path) -> Iterator[Shelf]:
    opened = Shelf(tmp_path)
    yield opened
    opened.current.close()


def put(service: Service, **item: object) -> None:
    assert not service.put_items(ItemsRequest(items=[item])).rejected


def is_hidden(service: Service, item_id: str) -> bool:
    try:
        service.item(item_id)
    except UnknownItem:
        return True
    return False


def test_the_same_catalogue_keeps_content_version_and_journal(bundles):
    one = bundles.current
    put(one, item_id="new", title="blue kettle", price=3.5)
    put(one, item_id="item000011", title="changed")
    one.hide_item("item000007")
    before = [one.item(name) for name in ("new", "item000011", "item000002")]
    two = bundles.to("two")
    assert two.versions()["model_version"] != one.versions()["model_version"]
    assert [two.item(name) for name in ("new", "item000011", "item000002")] == before
    assert is_hidden(two, "item000007")
    put(two, item_id="newer", title="red kettle")
    two.close()
    bundles.current = Service.open(
        bundles.folder / "two", f"lmdb:{bundles.folder.parent}/history", "cpu", bundles.options
    )
    assert bundles.current.item("newer").catalog_version == two.versions()["catalog_version"]
    assert is_hidden(bundles.current, "item000007")


def test_an_item_that_was_put_and_hidden_stays_hidden_in_the_same_catalogue(bundles):
    one = bundles.current
    put(one, item_id="brief", title="blue kettle")
    put(one, item_id="item000011", title="changed")
    for item_id in ("brief", "item000011"):
        one.hide_item(item_id)
    version = one.versions()["catalog_version"]
    two = bundles.to("two", close=False)
    assert two.versions()["catalog_version"] == version
    assert is_hidden(two, "brief") and is_hidden(two, "item000011")
    hand_over(two, one, lambda: None, override=True)  # a rollback
    bundles.current = one
    two.close()
    assert is_hidden(one, "brief") and is_hidden(one, "item000011")
    put(one, item_id="brief", title="blue kettle again")
    assert bundles.to("two").item("brief").title == "blue kettle again"


@pytest.mark.parametrize("way", [("one", "other"), ("one", "two", "other")])
def test_a_hidden_item_stays_hidden_after_another_item_took_its_semantic_id(bundles, way):
    put(bundles.current, item_id="brief", title="blue kettle")
    bundles.to("other")  # its journal has the item from now on
    for name in way[:-1]:
        service = bundles.to(name)
        if name == "one":
            service.hide_item("brief")
            put(service, item_id="next", title="blue kettle")
    other = bundles.to(way[-1])
    assert is_hidden(other, "brief") and not is_hidden(other, "next")


def test_another_catalogue_gets_new_and_hidden_items_and_keeps_its_own_words(bundles):
    one = bundles.current
    put(one, item_id="new", title="blue kettle", categories=["Kitchen > Tools"], price=3.5)
    put(one, item_id="item000011", title="changed")
    put(one, item_id=DROPPED[0], title="changed too")
    title = one.catalog.current.catalog.items.titles[11]
    one.hide_item("item000007")
    other = bundles.to("other")
    assert other.item("new").title == "blue kettle" and other.item("new").attributes["price"] == 3.5
    assert other.item(DROPPED[0]).title == "changed too"
    assert is_hidden(other, DROPPED[1])  # nobody put it, and the new bundle does not have it
    assert other.item("item000011").title == title
    assert is_hidden(other, "item000007")
    slate = other.recommend(RecommendRequest(history=["new"], k=400, beam_width=400))
    shown = {item.item_id for item in slate.items}
    assert "item000007" not in shown and DROPPED[1] not in shown


def test_a_rollback_brings_the_old_bundle_with_all_later_changes(bundles):
    put(bundles.current, item_id="new", title="blue kettle")
    bundles.current.hide_item("item000007")
    other = bundles.to("other")
    put(other, item_id="new", title="green kettle")
    put(other, item_id="item000011", title="later")
    put(other, item_id="item000007", title="back again")
    other.hide_item("item000009")
    one = bundles.to("one", override=True)
    assert one.item("new").title == "green kettle"
    assert one.item("item000011").title == "later"
    assert one.item("item000007").title == "back again"
    assert is_hidden(one, "item000009")
    other = bundles.to("other")  # its journal hides an item that is visible again meanwhile
    assert other.item("item000007").title == "back again" and is_hidden(other, "item000009")


@pytest.mark.parametrize("name", ["two", "other"])
def test_a_service_that_was_replaced_answers_again_with_all_later_changes(bundles, name):
    one = bundles.current
    put(one, item_id="new", title="blue kettle")
    one.hide_item("item000007")
    later = bundles.to(name, close=False)
    put(later, item_id="new", title="green kettle")
    put(later, item_id="item000007", title="back again")
    hand_over(later, one, lambda: None, override=True)
    bundles.current = one
    assert one.item("new").title == "green kettle" and one.item("item000007").title == "back again"
    put(one, item_id="newer", title="red kettle")
    put(later, item_id="late", title="late kettle")  # a request that is in flight on the successor
    assert one.item("newer").title == "red kettle" and one.item("late").title == "late kettle"
    user = one.samples(1, 1)["users"][0]
    later.close()
    assert one.history(user).events  # the store belongs to the service that answers
    one.close()
    bundles.current = Service.open(
        bundles.folder / "one", f"lmdb:{bundles.folder.parent}/history", "cpu", bundles.options
    )
    assert bundles.current.item("late").title == "late kettle"


def test_changes_that_reach_the_old_service_later_are_applied_to_the_new_one(bundles):
    old = bundles.current
    new = bundles.to("other", close=False)
    put(old, item_id="late", title="late kettle")
    assert new.item("late").title == "late kettle"
    assert old.hide_item("item000020").catalog_version == new.versions()["catalog_version"]
    assert is_hidden(new, "item000020")
    old.close()


def test_changes_during_the_hand_over_wait_and_are_not_lost(bundles):
    old = bundles.current
    new = open_successor(old, Bundle.open(bundles.folder / "other"), "cpu", bundles.options)
    writer = threading.Thread(target=put, args=(old,), kwargs={"item_id": "mid", "title": "kettle"})

    def publish() -> None:
        writer.start()
        assert not writer.join(0.2) and writer.is_alive()

    hand_over(old, new, publish)
    writer.join()
    old.close()
    bundles.current = new
    assert new.item("mid").title == "kettle"


def test_histories_are_shared_and_known_users_get_no_events_twice(bundles):
    one = bundles.current
    user = one.samples(1, 1)["users"][0]
    event = EventInput(user_id=user, item_id="item000042", type="click")
    one.add_events(EventsRequest(events=[event]))
    before = one.history(user)
    other = bundles.to("other", close=False)
    dropped = [event for event in before.events if event.item_id in DROPPED]
    after = other.history(user)
    assert len(after.events) == len(before.events) - len(dropped)
    assert after.events[-1] == before.events[-1] and after.events[-1].item_id == "item000042"
    one.delete_user(user)  # a request that is still in flight on the old service
    assert other.history(user).events == []
    one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_a_successor_is_opened_at_low_priority_and_its_engine_has_the_usual_one(
    bundles, monkeypatch
):
    def niceness(thread: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread)

    opened_at = []
    original = Service.open

    def watched(*arguments, **named):
        opened_at.append(niceness(threading.get_native_id()))
        return original(*arguments, **named)

    monkeypatch.setattr(Service, "open", watched)
    usual = niceness(threading.get_native_id())
    before = set(threading.enumerate())
    two = bundles.to("two")
    (engine,) = {t for t in threading.enumerate() if t.name == "engine"} - before
    assert opened_at == [min(usual + NICENESS, 19)] and niceness(engine.native_id) == usual
    assert niceness(threading.get_native_id()) == usual
    assert two.recommend(RecommendRequest(history=["item000001"], k=3)).items


def test_an_error_while_opening_is_the_callers(bundles):
    def damaged() -> None:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        at_low_priority(damaged)
    weights = bundles.folder / "two" / "ranker" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    two = Bundle.open(bundles.folder / "two")
    with pytest.raises(BundleError, match="ranker/model.safetensors: sha256 is"):
        open_successor(bundles.current, two, "cpu", bundles.options)


def test_tokens_stay_valid(bundles):
    one = bundles.current
    answer = one.recommend(RecommendRequest(user=UserRef(id="user000001"), k=1))
    signer: Signer = bundles.to("two").signer
    assert signer.read(answer.attribution_token).model_version == answer.model_version


def test_a_replaced_service_leaves_no_engine_and_no_memory(bundles):
    def engines() -> int:
        return sum(thread.name == "engine" for thread in threading.enumerate())

    running = engines()
    gone = []
    for name in ("two", "other") * 3:
        old = bundles.current
        gone.append((weakref.ref(old), weakref.ref(old.engine), weakref.ref(old.catalog.current)))
        put(old, item_id="new", title=name)
        bundles.to(name)
        del old
    gc.collect()
    assert [ref for refs in gone for ref in refs if ref() is not None] == []
    assert engines() == running


def test_an_unfit_bundle_is_refused(bundles, tmp_path, monkeypatch):
    one, options = bundles.current, bundles.options
    two = Bundle.open(bundles.folder / "two")
    check_successor(one, two, options, force=False)
    one.catalog.current.catalog.items.ids[:] = ["x", "y", "item000001"]
    with pytest.raises(UnfitBundle, match="33% of the current items"):
        check_successor(one, two, options, force=False)
    check_successor(one, two, options, force=True)
    one.catalog.current.catalog.items.ids[:] = two.catalog().items.ids
    bare = Bundle.open(bundles.folder / "other")
    del bare.manifest.sections["ranker"]
    with pytest.raises(UnfitBundle, match="no ranker"):
        check_successor(one, bare, options, force=False)
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 1 kB\n")
    monkeypatch.setattr(memory_module, "MEMORY_INFO", tmp_path / "meminfo")
    with pytest.raises(UnfitBundle, match="MB are free"):
        check_successor(one, two, options, force=True)


def test_free_memory_is_what_machine_and_container_leave(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 5000 kB\n")
    monkeypatch.setattr(memory_module, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_module, "CGROUP", tmp_path)
    device = memory_module.torch.device("cpu")
    assert memory_module.available_bytes(device) == 5000 << 10
    for name, text in (("max", "4000000"), ("current", "3000000"), ("stat", "inactive_file 7\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory_module.available_bytes(device) == 1_000_007
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_module.available_bytes(device) == 5000 << 10


def test_the_estimate_counts_files_and_caches(bundles):
    bundle = Bundle.open(bundles.folder / "one")
    size = sum(path.stat().st_size for path in bundle.root.rglob("*") if path.is_file())
    size -= (bundle.root / "manifest.json").stat().st_size
    cpu, cuda, config = torch.device("cpu"), torch.device("cuda"), EngineConfig(kv_bytes=2**22)
    assert needed_bytes(bundle, config, cpu) == 2 * size + 2 * 2**22
    graphs = config.search_limits.bytes + config.prefill_limits.bytes
    assert needed_bytes(bundle, config, cuda) == 2 * size + 2 * 2**22 + graphs
    for without in (replace(config, graphs=False), replace(config, invariant=True)):
        assert needed_bytes(bundle, without, cuda) == 2 * size + 2 * 2**22
