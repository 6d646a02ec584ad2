"""One suite for both stores: what is accepted is kept, in order, and damage is refused."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
import redis
from conftest import free_port, start_redis

from recserve.features.history import (
    EVENT_TYPES,
    MAX_TIME_US,
    CorruptHistory,
    HistoryStore,
    StoredEvent,
    StoreUnavailable,
    event_key,
    merge,
    open_store,
    pack,
    records,
    unpack,
)
from recserve.features.redis_store import PREFIX


def event(number: int, time: int | None = None) -> StoredEvent:
    """Event of key `number`, by default at time `number`."""
    return StoredEvent(number * 7 % 2**64, number if time is None else time, number, 1, 0.5)


class Opened:
    """A store, and a way to read and break its bytes from outside."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind, _, self.rest = url.partition(":")

    def open(self, cap: int = 8) -> HistoryStore:
        return open_store(self.url, cap=cap, map_size_bytes=16 << 20)

    def damage(self, user: str, value: bytes) -> None:
        if self.kind == "redis":
            redis.Redis.from_url(self.url).set(PREFIX + user.encode(), value)
            return
        with (
            lmdb.open(self.rest, map_size=16 << 20) as environment,
            environment.begin(write=True) as t,
        ):
            t.put(user.encode(), value)

    def raw(self) -> dict[bytes, bytes]:
        if self.kind == "redis":
            client = redis.Redis.from_url(self.url)
            return {key.removeprefix(PREFIX): client.get(key) for key in client.scan_iter()}
        with lmdb.open(self.rest, map_size=16 << 20) as environment, environment.begin() as t:
            return dict(t.cursor())


@pytest.fixture(params=["lmdb", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    if request.param == "lmdb":
        return Opened(f"lmdb:{tmp_path / 'histories'}")
    url = request.getfixturevalue("redis_url")
    redis.Redis.from_url(url).flushall()
    return Opened(url)


@pytest.fixture
def store(opened: Opened) -> Iterator[HistoryStore]:
    store = opened.open()
    yield store
    store.close()


def keys(history: np.ndarray | CorruptHistory) -> list[int]:
    assert isinstance(history, np.ndarray)
    return history["event_key"].tolist()


def test_unknown_user_has_no_events(store: HistoryStore) -> None:
    assert len(store.get("nobody")) == 0
    assert [len(h) for h in store.get_many(["a", "b"])] == [0, 0]  # type: ignore[arg-type]
    assert store.get_many([]) == []
    assert store.delete("nobody") is False


def test_keeps_every_field(store: HistoryStore) -> None:
    given = StoredEvent(2**64 - 1, MAX_TIME_US - 1, 2**63, len(EVENT_TYPES) - 1, -1.25)
    assert store.append("ü/1", [given]) == [True]
    (row,) = store.get("ü/1").tolist()
    assert row == (2**64 - 1, 2**63, MAX_TIME_US - 1, -1.25, len(EVENT_TYPES) - 1)


def test_duplicates_are_told_apart_within_and_across_calls(store: HistoryStore) -> None:
    assert store.append("u", [event(1), event(2), event(1, time=9)]) == [True, True, False]
    assert store.append("u", [event(2), event(3)]) == [False, True]
    assert keys(store.get("u")) == [1, 2, 3]
    assert store.append("u", []) == []


def test_late_events_are_inserted_in_order_of_time(store: HistoryStore) -> None:
    store.append("u", [event(10), event(30), event(20)])
    store.append("u", [event(5), event(25), event(40), event(11, time=20)])
    assert keys(store.get("u")) == [5, 10, 20, 11, 25, 30, 40]


def test_a_key_inside_a_record_is_no_duplicate(store: HistoryStore) -> None:
    """The bytes of a new key may occur in a record at another place than the key."""
    store.append("u", [StoredEvent(item_key=77, time_us=99, event_key=1)])
    assert store.append("u", [StoredEvent(1, 100, 77), StoredEvent(1, 101, 99)]) == [True, True]


def test_trims_at_twice_the_cap(store: HistoryStore) -> None:
    store.append("u", [event(n) for n in range(16)])
    assert keys(store.get("u")) == list(range(16))
    store.append("u", [event(16)])
    assert keys(store.get("u")) == list(range(9, 17))


def test_append_many_and_get_many_agree(store: HistoryStore) -> None:
    added = {f"u{n}": [event(n), event(n + 1)] for n in range(5)}
    assert store.append_many(added) == {user: [True, True] for user in added}
    assert [keys(h) for h in store.get_many(list(added))] == [[n, n + 1] for n in range(5)]


def test_survives_reopening(opened: Opened) -> None:
    store = opened.open()
    store.append("u", [event(1)])
    store.close()
    store = opened.open()
    assert keys(store.get("u")) == [1]
    store.close()


def test_delete_leaves_nothing(opened: Opened) -> None:
    store = opened.open()
    store.append_many({"gone": [event(1)], "kept": [event(2)]})
    assert store.delete("gone") is True
    assert len(store.get("gone")) == 0
    store.close()
    assert set(opened.raw()) == {b"kept"}


GOOD = pack(records([event(1), event(2)]))
DAMAGED = {
    "empty": b"",
    "short": GOOD[:10],
    "header only": GOOD[:16],
    "cut": GOOD[:-1],
    "longer": GOOD + b"x",
    "magic": b"XX" + GOOD[2:],
    "version": GOOD[:2] + b"\x02" + GOOD[3:],
    "count": GOOD[:4] + b"\xff\xff\xff\xff" + GOOD[8:],
    "flipped": GOOD[:30] + bytes([GOOD[30] ^ 1]) + GOOD[31:],
    "foreign": b"some other program's value",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_refused_and_not_overwritten(opened: Opened, name: str) -> None:
    opened.damage("bad", DAMAGED[name])
    store = opened.open()
    store.append("good", [event(3)])
    with pytest.raises(CorruptHistory):
        store.get("bad")
    with pytest.raises(CorruptHistory):
        store.append("bad", [event(4)])
    answers = store.append_many({"bad": [event(4)], "good": [event(4)]})
    assert isinstance(answers["bad"], CorruptHistory) and answers["good"] == [True]
    bad, good = store.get_many(["bad", "good"])
    assert isinstance(bad, CorruptHistory) and keys(good) == [3, 4]
    store.close()
    assert opened.raw()[b"bad"] == DAMAGED[name]
    store = opened.open()
    assert store.delete("bad") is True
    assert store.append("bad", [event(4)]) == [True]
    store.close()


def test_stores_agree_with_the_plain_merge(store: HistoryStore) -> None:
    rng = np.random.default_rng(0)
    history = np.empty(0, dtype=records([]).dtype)
    for _ in range(40):
        new = [event(int(k), int(t)) for k, t in rng.integers(0, 60, size=(rng.integers(1, 6), 2))]
        merged = merge(history, new, cap=8)
        assert store.append("u", new) == merged.accepted
        history = merged.history
        assert store.get("u").tobytes() == history.tobytes()


def test_threads_lose_nothing(store: HistoryStore) -> None:
    def work(first: int) -> None:
        for number in range(first, first + 4):
            store.append("u", [event(number)])

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 4, 8, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys(store.get("u")) == list(range(16))


@pytest.mark.parametrize("user", ["", "x" * 481, "\ud800"])
def test_refuses_user_ids(store: HistoryStore, user: str) -> None:
    for call in (store.get, store.delete, lambda u: store.append(u, [event(1)])):
        with pytest.raises(ValueError, match="user id"):
            call(user)


@pytest.mark.parametrize(
    "fields",
    [
        {"item_key": -1},
        {"event_key": 2**64},
        {"time_us": -1},
        {"time_us": MAX_TIME_US},
        {"type": len(EVENT_TYPES)},
        {"value": float("nan")},
        {"value": 1e39},
    ],
    ids=str,
)
def test_refuses_fields_out_of_range(fields: dict[str, float]) -> None:
    plain = {"item_key": 1, "time_us": 1, "event_key": 1}
    with pytest.raises(ValueError, match=next(iter(fields))):
        StoredEvent(**(plain | fields))  # type: ignore[arg-type]


def test_unpack_is_the_inverse_of_pack() -> None:
    history = records([event(3), event(4)])
    assert unpack(pack(history)).tolist() == history.tolist()
    assert len(pack(history)) == 16 + 2 * 29
    assert event_key("a") != event_key("b")


@pytest.mark.parametrize("url", ["", "lmdb:", "mysql://x", "histories"])
def test_refuses_urls(url: str) -> None:
    with pytest.raises(ValueError, match="scheme"):
        open_store(url)


WRITER = """
import sys
from recserve.features.history import StoredEvent, open_store
store = open_store("lmdb:" + sys.argv[1], cap=100000 // 2)
for number in range(1, 1_000_000):
    store.append(f"u{number % 3}", [StoredEvent(number, number, number)])
    print(number, flush=True)
"""


def test_lmdb_keeps_what_was_acknowledged_before_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(50)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    store = open_store(f"lmdb:{path}")
    found = {key for user in ("u0", "u1", "u2") for key in keys(store.get(user))}
    store.close()
    assert found >= set(acknowledged)
    assert len(found) <= len(acknowledged) + 1


def test_lmdb_says_when_it_is_full(tmp_path: Path) -> None:
    store = open_store(f"lmdb:{tmp_path / 'small'}", map_size_bytes=64 << 10)
    with pytest.raises(StoreUnavailable, match="map size"):
        for number in range(2000):
            store.append(f"user{number}", [event(n) for n in range(20)])
    assert keys(store.get("user0")) == list(range(20))
    store.close()


def test_lmdb_refuses_a_damaged_file(tmp_path: Path) -> None:
    folder = tmp_path / "histories"
    folder.mkdir()
    (folder / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreUnavailable):
        open_store(f"lmdb:{folder}")


def test_redis_faults_are_typed_and_pass(tmp_path: Path) -> None:
    server, port = start_redis(tmp_path)
    url = f"redis://127.0.0.1:{port}/0"
    store = open_store(url, timeout_s=0.1)
    try:
        store.append("u", [event(1)])
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            store.get("u")
        server.send_signal(signal.SIGCONT)
        assert keys(store.get("u")) == [1]
        client = redis.Redis.from_url(url)
        client.script_flush()
        assert store.append("u", [event(2)]) == [True]
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="(?i)memory"):
            store.append("u", [event(3)])
        assert keys(store.get("u")) == [1, 2]
    finally:
        server.send_signal(signal.SIGCONT)
        server.kill()
        server.wait()
    with pytest.raises(StoreUnavailable):
        store.get("u")
    with pytest.raises(StoreUnavailable):
        store.append("u", [event(4)])
    server, _ = start_redis(tmp_path, port)
    try:
        assert store.append("u", [event(4)]) == [True]
    finally:
        server.kill()
        server.wait()
    store.close()


def test_redis_that_is_not_there() -> None:
    with pytest.raises(StoreUnavailable):
        open_store(f"redis://:secret@127.0.0.1:{free_port()}/0", timeout_s=0.1)


def test_redis_key_of_another_type_is_refused(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    client.rpush(PREFIX + b"u", b"x")
    store = open_store(redis_url)
    with pytest.raises(CorruptHistory):
        store.append("u", [event(1)])
    store.close()
