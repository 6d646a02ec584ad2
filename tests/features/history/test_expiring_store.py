"""Events older than the store's `ttl_s` are not read, and are deleted from every store."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from recserve.bounds import MIN_TIME_US
from recserve.features.history import stores
from recserve.features.history.history import (
    Applied,
    Change,
    Expiry,
    HistoryStore,
    Removal,
    Replacement,
    StoredEvent,
    StoredUsers,
    StoreOptions,
    StoreUnavailable,
    merge,
    records,
)
from recserve.features.history.lmdb_store import LmdbStore
from recserve.features.history.stores import ExpiringStore, open_store, split_ttl
from tests.support.partial_stores import MemoryStore

HOUR_S = 3600.0


@pytest.fixture(params=["lmdb", "redis", "memory"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HistoryStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    url = f"lmdb:{tmp_path / 'histories'}"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        redis.Redis.from_url(url).flushall()
    store = open_store(url, StoreOptions(cap=8, map_size_bytes=16 << 20))
    yield store
    store.close()


@pytest.fixture
def expiring(plain: HistoryStore) -> Iterator[Callable[..., ExpiringStore]]:
    """Puts an ExpiringStore of an hour around the plain store."""
    opened: list[ExpiringStore] = []

    def wrap(*clock: Callable[[], float]) -> ExpiringStore:
        opened.append(ExpiringStore(plain, HOUR_S, *clock))
        return opened[-1]

    yield wrap
    for store in opened:
        store.close()


def event(key: int, age_s: float) -> StoredEvent:
    return StoredEvent(key, time.time_ns() // 1000 - int(age_s * 1e6), key)


def keys(store: HistoryStore, user_id: str) -> list[int]:
    return store.get(user_id)["event_key"].tolist()


class Clock:
    """A clock that tests turn forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def test_expired_events_are_neither_read_nor_kept(plain: HistoryStore, expiring) -> None:
    plain.append("ann", [event(1, 5 * HOUR_S), event(2, 0.5 * HOUR_S)])
    clock = Clock()
    store = expiring(clock)
    assert store.ttl_s == HOUR_S and store.blocks == plain.blocks
    assert keys(store, "ann") == [2]
    assert store.append("ann", [event(3, 0), event(2, 0)]) == [True, False]
    assert keys(plain, "ann") == [2, 3]
    clock.ahead_s = 0.75 * HOUR_S
    assert keys(store, "ann") == [3] and keys(plain, "ann") == [2, 3]
    clock.ahead_s = 2 * HOUR_S
    applied = store.append_many({"ann": [Removal(3)], "bob": [event(9, 0)]})
    assert applied["ann"].taken == [False]
    assert plain.get("ann").size == 0


def test_events_without_a_timestamp_do_not_expire(plain: HistoryStore, expiring) -> None:
    positions = [StoredEvent(n, n, n) for n in (0, 1)]
    plain.append("ann", [*positions, event(5, 2 * HOUR_S), event(6, 0)])
    store = expiring()
    assert keys(store, "ann") == [0, 1, 6]
    store.append("ann", [event(7, 0)])
    assert keys(plain, "ann") == [0, 1, 6, 7]


def test_a_sweep_deletes_events_of_users_who_stay_away(plain: HistoryStore, expiring) -> None:
    if isinstance(plain, MemoryStore):
        pytest.skip("this store cannot list its users")
    old, new = [event(1, 2 * HOUR_S)], [event(2, 0)]
    plain.append_many({f"u{n}": old if n % 2 else new for n in range(1100)})
    store = expiring()
    until_s = time.monotonic() + 20
    while any(plain.get(f"u{n}").size for n in (1, 1099)) and time.monotonic() < until_s:
        time.sleep(0.01)
    store.sweep()
    assert {one for n in range(1, 1100, 2) for one in keys(plain, f"u{n}")} == set()
    assert all(keys(plain, f"u{n}") == [2] for n in range(0, 1100, 2))
    listed = plain.users("", 2000, None).ids
    assert len(set(listed)) == 550


def test_a_sweep_passes_over_damage(tmp_path: Path, redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    client.set(b"recserve:history:bad", b"no history")
    plain = open_store(redis_url)
    plain.append("ann", [event(1, 2 * HOUR_S)])
    store = ExpiringStore(plain, HOUR_S)
    store.sweep()
    assert client.keys() == [b"recserve:history:bad"]
    store.close()


def test_a_sweep_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch) -> None:
    """Another writer has LMDB's lock. The store stays open, because the sweep uses it."""
    plain, called = LmdbStore(tmp_path / "histories", map_size_bytes=16 << 20), threading.Event()
    plain.append("ann", [event(1, 2 * HOUR_S), event(2, 0)])
    append_many = plain.append_many

    def append(changes):
        called.set()
        return append_many(changes)

    monkeypatch.setattr(plain, "append_many", append)
    monkeypatch.setattr(stores, "CLOSE_S", 0.05)
    with plain._environment.begin(write=True):
        store = ExpiringStore(plain, HOUR_S)
        assert called.wait(60)
        closing = threading.Thread(target=store.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    store._thread.join(60)
    assert not store._thread.is_alive() and keys(plain, "ann") == [2]
    plain.close()


class Failing(MemoryStore):
    """Fails to list its users so often, and then lists none."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.calls, self.listed = times, 0, threading.Event()

    def users(self, prefix, limit, after):
        self.calls += 1
        if self.calls <= self.times:
            raise StoreUnavailable("the store is away")
        self.listed.set()
        return StoredUsers([], None)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_sweeps_go_on_after_an_outage(times: int) -> None:
    plain = Failing(times)
    store = ExpiringStore(plain, 0.01)
    assert plain.listed.wait(60)
    store.close()
    assert plain.calls > times


def any_change(rng: np.random.Generator) -> Change:
    key, kind, at = (int(n) for n in rng.integers(0, [40, 5, 60]))
    moment = at if at < 10 else MIN_TIME_US + at
    new = StoredEvent(key, moment, key)
    if kind == 0:
        return Expiry(MIN_TIME_US + at - 30 if at > 30 else MIN_TIME_US)
    if kind == 1:
        return Removal(key)
    return Replacement(new, bool(at % 2)) if kind == 2 else new


def test_stores_expire_as_the_plain_merge_does(plain: HistoryStore) -> None:
    rng = np.random.default_rng(3)
    history, num_expired = records([]), 0
    for _ in range(150):
        changes = [any_change(rng) for _ in range(rng.integers(1, 7))]
        merged = merge(history, changes, cap=8)
        applied = plain.append_many({"u": changes})["u"]
        assert isinstance(applied, Applied) and applied.taken == merged.applied.taken
        assert (applied.revised is None) == (merged.applied.revised is None)
        history = merged.history
        assert plain.get("u").tobytes() == history.tobytes()
        for change, taken in zip(changes, applied.taken, strict=True):
            num_expired += isinstance(change, Expiry) and taken
    assert num_expired > 10


def test_a_url_may_say_the_age(tmp_path: Path) -> None:
    assert split_ttl("redis://h:1/0?ttl_s=60&db=3") == ("redis://h:1/0?db=3", 60.0)
    assert split_ttl("lmdb:/a/b") == ("lmdb:/a/b", None)
    store = open_store(f"lmdb:{tmp_path}/one?ttl_s=60", StoreOptions(ttl_s=5))
    assert store.ttl_s == 60 and (tmp_path / "one" / "data.mdb").is_file()
    store.append("u", [event(1, 120), event(2, 0)])
    store.close()
    with_option = open_store(f"lmdb:{tmp_path}/one", StoreOptions(ttl_s=1e6))
    assert with_option.ttl_s == 1e6
    with_option.close()
    for wrong in ("0", "-1", "nan", "soon", ""):
        with pytest.raises(ValueError, match="ttl_s is"):
            open_store(f"lmdb:{tmp_path}/one?ttl_s={wrong}")
