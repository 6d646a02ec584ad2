"""A history store of another package: one class, one entry point."""

import time

import pytest

from recserve.features.history import stores
from recserve.features.history.history import HistoryStore, StoredEvent, StoreOptions
from recserve.features.history.lmdb_store import LmdbStore
from recserve.features.history.stores import ExpiringStore, GuardedStore, open_store
from tests.support.partial_stores import MemoryStore

MODULE = """
from recserve.features.history.history import HistoryStore, StoreUnavailable, read_stored
from recserve.features.history.history import merge


class MemoryStore(HistoryStore):
    blocks = False

    @classmethod
    def open(cls, url, options):
        if url != "memory:here":
            raise StoreUnavailable(url)
        return cls(options.cap)

    def __init__(self, cap):
        self.cap, self.histories = cap, {}

    def get_many(self, user_ids):
        return [self.histories.get(name, read_stored(None)) for name in user_ids]

    def append_many(self, changes):
        applied = {}
        for name, made in changes.items():
            merged = merge(self.get(name), made, self.cap)
            self.histories[name], applied[name] = merged.history, merged.applied
        return applied

    def delete(self, user_id):
        return self.histories.pop(user_id, None) is not None

    def close(self):
        self.histories.clear()
"""
ENTRY_POINTS = "[recserve.stores]\nmemory = memory_store:MemoryStore\nlmdb = memory_store:Missing\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder on the path, as pip leaves it."""
    (tmp_path / "memory_store.py").write_text(MODULE)
    about = tmp_path / "memory_store-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: memory-store\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_installed_store_opens_by_its_scheme(installed, tmp_path):
    store = open_store("memory:here", StoreOptions(cap=2))
    assert store.cap == 2 and not store.blocks
    assert store.append("u", [StoredEvent(7, time, time) for time in (1, 2)]) == [True, True]
    assert store.get("u")["event_key"].tolist() == [1, 2]
    assert store.delete("u") and not store.get("u").size
    own = open_store(f"lmdb:{tmp_path}/own")
    assert type(own).__name__ == "LmdbStore"
    own.close()


def test_an_unknown_scheme_names_those_that_are_installed(installed):
    with pytest.raises(ValueError, match=r"'mysql'.*lmdb, memory, redis, .*rediss, .*unix"):
        open_store("mysql://x")


def test_a_store_that_lacks_a_method_is_refused_when_it_is_opened():
    class Half(MemoryStore):
        append_many = HistoryStore.append_many

    with pytest.raises(TypeError, match="append_many"):
        Half()


def test_a_store_that_waits_for_a_network_is_guarded(monkeypatch, tmp_path):
    """The finished stack: time limit and circuits in front, then expiry, then the store."""

    class Remote(MemoryStore):
        blocks = True

        @classmethod
        def open(cls, url, options):
            return cls()

    monkeypatch.setattr(stores, "store_class", lambda url: Remote if "memory" in url else LmdbStore)
    plain = open_store("memory:x")
    full = open_store("memory:x?ttl_s=60", StoreOptions(read_timeout_s=0.2))
    assert isinstance(plain, GuardedStore) and isinstance(plain.store, MemoryStore)
    assert plain.read_timeout_s is None and plain.ttl_s is None
    assert isinstance(full, GuardedStore) and isinstance(full.store, ExpiringStore)
    assert isinstance(full.store.store, MemoryStore)
    assert full.read_timeout_s == 0.2 and full.ttl_s == 60 and full.blocks
    event = StoredEvent(1, time.time_ns() // 1000, 2)
    assert full.append("u", [event]) == [True]
    assert full.read("u").size == full.get("u").size == 1
    full.close()
    plain.close()
    local = open_store(f"lmdb:{tmp_path}/local", StoreOptions(read_timeout_s=0.2))
    assert not isinstance(local, GuardedStore) and not local.blocks
    local.close()
