"""A bundle file that changes between its hash and its use is refused by name."""

import os
import shutil

import pytest

from recserve.bundle.bundle import Bundle, BundleError
from recserve.engine.engine_config import EngineConfig
from recserve.features.history.history import StoreOptions
from recserve.features.history.stores import open_store
from recserve.service import Service, ServiceOptions
from recserve.service import service as service_module
from recserve.service.live_catalog import LiveCatalog
from recserve.service.replacement import open_successor
from tests.support.bundle_shelf import shelf

RANKER = "ranker/model.safetensors"
# Functions of `Service.open` in the order of their calls: before, between and after the files.
STAGES = [
    (service_module, "resolve_device"),
    (service_module, "load_item_graph"),
    (LiveCatalog, "open_tools"),
]


@pytest.fixture
def bundles(tmp_path):
    return shelf(tmp_path)


def options(bundles):
    return ServiceOptions(engine=EngineConfig(kv_bytes=2**22), journal=bundles / ".items")


def open_service(bundles, name="one"):
    return Service.open(bundles / name, f"lmdb:{bundles}/.history", "cpu", options(bundles))


def change_at(patch, place, name, change):
    """Calls `change` each time that a function is called, before the function."""
    original = getattr(place, name)

    def changing(*given, **named):
        change()
        return original(*given, **named)

    patch.setattr(place, name, changing)


def write(path, content):
    """Writes into the same file and sets its time back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path, content):
    new = path.with_name("new")
    new.write_bytes(content)
    new.replace(path)


def link(path, content):
    path.with_name(".elsewhere").write_bytes(content)
    path.unlink()
    path.symlink_to(path.with_name(".elsewhere"))


def flip(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "place, name, file",
    [
        (*stage, file)
        for stage, file in zip(
            STAGES, ("catalog.parquet", RANKER, "quantizer/config.json"), strict=True
        )
    ],
)
def test_a_file_that_is_written_during_the_load_is_refused(bundles, monkeypatch, place, name, file):
    """Even with the same bytes: what was loaded in between is not known."""
    path = bundles / "one" / file
    with monkeypatch.context() as patch:
        change_at(patch, place, name, lambda: write(path, path.read_bytes()))
        with pytest.raises(BundleError, match=rf"one/{file}: has changed while the bundle"):
            open_service(bundles)
    open_service(bundles).close()


@pytest.mark.parametrize("change", [write, replace, link])
def test_one_changed_bit_of_a_weight_is_refused(bundles, monkeypatch, change):
    path = bundles / "one" / RANKER
    content = path.read_bytes()
    with monkeypatch.context() as patch:
        change_at(patch, *STAGES[0], lambda: change(path, flip(content)))
        with pytest.raises(BundleError, match=rf"one/{RANKER}: (has changed|a link)"):
            open_service(bundles)


def test_a_file_that_is_changed_and_restored_is_refused(bundles, monkeypatch):
    path = bundles / "one" / RANKER
    content = path.read_bytes()
    change_at(monkeypatch, *STAGES[0], lambda: write(path, flip(content)))
    change_at(monkeypatch, *STAGES[2], lambda: write(path, content))
    with pytest.raises(BundleError, match=rf"one/{RANKER}: has changed"):
        open_service(bundles)


def test_events_that_change_before_their_import_do_not_reach_the_store(bundles, monkeypatch):
    path = bundles / "one" / "events.parquet"
    with monkeypatch.context() as patch:
        change_at(patch, Bundle, "all_events", lambda: write(path, path.read_bytes()))
        with pytest.raises(BundleError, match=r"one/events.parquet: has changed"):
            open_service(bundles)
    store = open_store(f"lmdb:{bundles}/.history", StoreOptions())
    assert store.get("user000001").size == 0
    store.close()
    with open_service(bundles) as service:
        assert service.history("user000001").events


def test_a_successor_that_changes_is_refused_and_the_service_goes_on(bundles, monkeypatch):
    """Also when file and manifest change together, after both were compared."""
    with open_service(bundles) as service:
        two = Bundle.open(bundles / "two")
        two.verify()
        shutil.rmtree(bundles / "two")
        shutil.copytree(bundles / "one", bundles / "two")
        with pytest.raises(BundleError, match="two/"):
            open_successor(service, two, "cpu", options(bundles))
        assert service.recommend({"history": ["item000001"], "k": 3}).items


def test_files_may_change_after_the_load(bundles):
    """A training writes into the folder of a bundle that is served; all weights are copies."""
    body = {"history": ["item000001"], "candidates": [{"item_id": "item000002"}]}
    with open_service(bundles) as service:
        slate = {"history": ["item000001"], "strategy": "beam"}
        before = service.rank(body).items, service.recommend(slate).items
        for name in service.bundle.manifest.files:
            path = bundles / "one" / name
            write(path, bytes(path.stat().st_size))
        assert (service.rank(body).items, service.recommend(slate).items) == before
