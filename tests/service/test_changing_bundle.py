"""A bundle file that changes between its hash and its use is refused by name."""

import os
import random
import shutil

import pytest

from recserve.bundle.bundle import Bundle, BundleError
from recserve.engine.engine_config import EngineConfig
from recserve.features.history.history import StoreOptions
from recserve.features.history.stores import open_store
from recserve.service import Service, ServiceOptions
from recserve.service.replacement import open_successor
from tests.support.bundle_shelf import shelf

RANKER = "ranker/model.safetensors"


@pytest.fixture
def bundles(tmp_path):
    return shelf(tmp_path)


def options(bundles):
    return ServiceOptions(engine=EngineConfig(kv_bytes=2**22), journal=bundles / ".items")


def open_service(bundles, name="one"):
    return Service.open(bundles / name, f"lmdb:{bundles}/.history", "cpu", options(bundles))


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


@pytest.mark.parametrize("seed", range(8))
def test_a_file_that_changes_during_the_load_is_refused(bundles, monkeypatch, seed):
    """Even if it has the same bytes again: what was loaded in between is not known."""
    draw = random.Random(seed)
    name = draw.choice([RANKER, *Bundle.open(bundles / "one").manifest.files])
    path, change = bundles / "one" / name, (write, replace, link)[seed % 3]
    content = path.read_bytes()
    if name.endswith(".safetensors"):
        content = draw.choice([content, content[:-1] + bytes([content[-1] ^ 1])])
    moment, left = ("verify", "check_unchanged")[seed % 2], [content]
    original = getattr(Bundle, moment)

    def changing(bundle):
        original(bundle)
        if left:
            change(path, left.pop())

    with monkeypatch.context() as patch:
        patch.setattr(Bundle, moment, changing)
        with pytest.raises(BundleError, match=rf"one/{name}: (has changed|a link)"):
            open_service(bundles)


def test_events_that_change_before_their_import_do_not_reach_the_store(bundles, monkeypatch):
    path, original = bundles / "one" / "events.parquet", Bundle.all_events

    def changing(bundle):
        write(path, path.read_bytes())
        return original(bundle)

    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "all_events", changing)
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
