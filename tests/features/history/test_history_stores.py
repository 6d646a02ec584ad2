"""One suite for both stores: what is accepted is kept, in order, and damage is refused."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest
import redis

from recserve.bounds import MAX_TIME_US
from recserve.features.history import redis_store
from recserve.features.history.history import (
    Applied,
    Change,
    CorruptHistory,
    HistoryStore,
    Removal,
    Replacement,
    StoredEvent,
    StoreOptions,
    StoreUnavailable,
    event_key,
    merge,
    pack,
    records,
    unpack,
)
from recserve.features.history.lmdb_store import copy_store
from recserve.features.history.redis_store import PREFIX
from recserve.features.history.stores import open_store
from recserve.features.history.type_names import MAX_EVENT_TYPES
from tests.support.redis_server import free_port, start_redis


def event(number: int, time: int | None = None) -> StoredEvent:
    """Event of key `number`, by default at time `number`."""
    return StoredEvent(number * 7 % 2**64, number if time is None else time, number, 1, 0.5)


class Opened:
    """A store, and a way to read and break its bytes from outside."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind, _, self.rest = url.partition(":")

    def open(self, cap: int = 8) -> HistoryStore:
        return open_store(self.url, StoreOptions(cap=cap, map_size_bytes=16 << 20))

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
    given = StoredEvent(2**64 - 1, MAX_TIME_US - 1, 2**63, MAX_EVENT_TYPES - 1, -1.25)
    assert store.append("ü/1", [given]) == [True]
    (row,) = store.get("ü/1").tolist()
    assert row == (2**64 - 1, 2**63, MAX_TIME_US - 1, -1.25, MAX_EVENT_TYPES - 1)


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
    assert store.append_many(added) == {user: Applied([True, True]) for user in added}
    assert [keys(h) for h in store.get_many(list(added))] == [[n, n + 1] for n in range(5)]


def other(number: int, time: int) -> StoredEvent:
    """What the event of key `number` should have been."""
    return StoredEvent(99, time, number, 2, -3.0)


def test_a_replacement_moves_to_its_new_time(store: HistoryStore) -> None:
    store.append("u", [event(10), event(20), event(30)])
    assert store.append("u", [Replacement(other(10, 30))]) == [True]
    assert keys(store.get("u")) == [20, 30, 10]  # of equal times the later arrival is last
    assert store.get("u")[2].tolist() == (99, 10, 30, -3.0, 2)
    assert store.append("u", [Replacement(other(30, 5))]) == [True]
    assert keys(store.get("u")) == [30, 20, 10]
    assert store.append("u", [event(30)]) == [False]


@pytest.mark.parametrize("how", [{"time": 20}, {"time": 0, "keeps_time": True}], ids=str)
def test_a_replacement_at_the_stored_time_keeps_its_place(
    store: HistoryStore, how: dict[str, int]
) -> None:
    """Events of one call have one time where the client says none: their order is their places."""
    store.append("u", [event(1, 20), event(2, 20), event(3, 20)])
    changed = Replacement(other(2, how["time"]), bool(how.get("keeps_time")))
    assert store.append("u", [changed]) == [True]
    assert keys(store.get("u")) == [1, 2, 3]
    assert store.get("u")[1].tolist() == (99, 2, 20, -3.0, 2)


def test_a_removed_event_is_gone_and_may_come_again(opened: Opened) -> None:
    store = opened.open()
    store.append("u", [event(1), event(2), event(3)])
    assert store.append("u", [Removal(2), Removal(2)]) == [True, False]
    assert keys(store.get("u")) == [1, 3]
    assert store.append("u", [event(2)]) == [True]
    assert store.append("u", [Removal(1), Removal(2), Removal(3)]) == [True] * 3
    assert len(store.get("u")) == 0
    store.close()
    assert opened.raw() == {}


def test_what_is_not_stored_is_not_corrected(store: HistoryStore) -> None:
    missing: list[Change] = [Replacement(other(4, 1)), Removal(5)]
    assert store.append("nobody", missing) == [False, False]
    store.append_many({"u": [event(n) for n in range(17)], "v": [event(5)]})
    before = store.get("u").tobytes()
    # 0 was trimmed away, 5 is another user's too, 7 * 3 is an item's key at another place.
    assert store.append("u", [Removal(0), Replacement(other(77, 1)), Removal(21)]) == [False] * 3
    assert store.get("u").tobytes() == before
    assert keys(store.get("v")) == [5] and len(store.get("nobody")) == 0


def test_changes_of_one_call_are_made_in_their_order(store: HistoryStore) -> None:
    store.append("u", [event(1)])
    changes = [
        *(event(2), Removal(2), event(2, 9), Replacement(other(1, 10)), event(1)),
        *(event(3), Removal(1), event(1, 4), Replacement(other(8, 1)), event(8)),
    ]
    expected = [True, True, True, True, False, True, True, True, False, True]
    assert store.append("u", changes) == expected
    assert keys(store.get("u")) == [3, 1, 8, 2]


def test_only_a_history_that_was_rewritten_comes_back(store: HistoryStore) -> None:
    """As it was and as it is: after late events, corrections and trims, not after events at the
    end.
    """

    def revised(*changes: Change) -> tuple[list[int], list[int]] | None:
        applied = store.append_many({"u": changes})["u"]
        assert isinstance(applied, Applied)
        found = applied.revised
        return None if found is None else (keys(found.before), keys(found.after))

    assert revised(event(20), event(10)) is None
    assert revised(event(30), event(40), event(21, 40)) is None
    assert revised(event(30), Removal(5)) is None
    assert revised(event(50), Removal(50), event(51), Replacement(other(51, 45))) is None
    assert revised(event(15)) == ([10, 20, 30, 40, 21, 51], [10, 15, 20, 30, 40, 21, 51])
    assert revised(event(60), Removal(20))[1] == [10, 15, 30, 40, 21, 51, 60]  # type: ignore[index]
    assert revised(Replacement(other(60, 0), keeps_time=True)) is not None
    assert revised(Replacement(other(60, 0), keeps_time=True)) is None
    late = revised(*(event(n, 1) for n in range(100, 110)))
    assert late is not None and late[1] == keys(store.get("u")) and len(late[1]) == 8
    assert revised(*(event(n) for n in range(200, 209))) == (late[1], list(range(201, 209)))
    assert keys(store.get("u")) == list(range(201, 209))


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
    for change in (event(4), Replacement(other(1, 1)), Removal(1)):
        with pytest.raises(CorruptHistory):
            store.append("bad", [change])
    answers = store.append_many({"bad": [event(4)], "good": [event(4)]})
    assert isinstance(answers["bad"], CorruptHistory) and answers["good"] == Applied([True])
    bad, good = store.get_many(["bad", "good"])
    assert isinstance(bad, CorruptHistory) and keys(good) == [3, 4]
    store.close()
    assert opened.raw()[b"bad"] == DAMAGED[name]
    store = opened.open()
    assert store.delete("bad") is True
    assert store.append("bad", [event(4)]) == [True]
    store.close()


def any_change(rng: np.random.Generator) -> Change:
    key, time, kind = (int(n) for n in rng.integers(0, [60, 60, 6]))
    new = StoredEvent(int(rng.integers(0, 60)), time, key, 1, 0.5)
    if kind == 0:
        return Removal(key)
    return Replacement(new, bool(time % 2)) if kind < 3 else new


@pytest.mark.parametrize("corrected", [False, True])
def test_stores_agree_with_the_plain_merge(store: HistoryStore, corrected: bool) -> None:
    rng = np.random.default_rng(0)
    history = np.empty(0, dtype=records([]).dtype)
    num_revised = 0
    for _ in range(120 if corrected else 40):
        if corrected:
            new = [any_change(rng) for _ in range(rng.integers(1, 9))]
        else:
            drawn = rng.integers(0, 60, size=(rng.integers(1, 6), 2))
            new = [event(int(k), int(t)) for k, t in drawn]
        merged = merge(history, new, cap=8)
        applied = store.append_many({"u": new})["u"]
        assert isinstance(applied, Applied) and applied.taken == merged.applied.taken
        assert (applied.revised is None) == (merged.applied.revised is None)
        if applied.revised is not None:
            num_revised += 1
            assert applied.revised.before.tobytes() == history.tobytes()
            assert applied.revised.after.tobytes() == merged.history.tobytes()
        history = merged.history
        assert store.get("u").tobytes() == history.tobytes()
    assert num_revised > 10


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_lose_nothing(store: HistoryStore) -> None:
    def work(number: int) -> None:
        for key in range(4 * number, 4 * number + 4):
            store.append("u", [event(key)])

    in_threads(work, 4)
    assert keys(store.get("u")) == list(range(16))


def test_threads_that_append_and_correct_lose_nothing(opened: Opened) -> None:
    """Of each thread's 12 events 4 are replaced, 4 removed, while the others go on appending."""
    store = opened.open(cap=64)
    taken: list[list[bool]] = []

    def work(number: int) -> None:
        for key in range(12 * number, 12 * number + 12):
            store.append("u", [event(key)])
            if key % 3 == 1:
                taken.append(store.append("u", [Replacement(other(key, 1000 - key))]))
            if key % 3 == 2:
                taken.append(store.append("u", [Removal(key)]))

    in_threads(work, 4)
    plain, moved = range(0, 48, 3), range(46, 0, -3)
    assert keys(store.get("u")) == [*plain, *moved]
    assert store.get("u")["item_key"].tolist() == [7 * key for key in plain] + [99] * 16
    assert taken == [[True]] * 32
    store.close()


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
        {"type": MAX_EVENT_TYPES},
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
from recserve.features.history.history import StoredEvent, StoreOptions
from recserve.features.history.stores import open_store
from recserve.features.history.type_names import MAX_EVENT_TYPES
store = open_store("lmdb:" + sys.argv[1], StoreOptions(cap=100000 // 2))
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
    store = open_store(f"lmdb:{tmp_path / 'small'}", StoreOptions(map_size_bytes=64 << 10))
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
    store = open_store(url, StoreOptions(timeout_s=0.1))
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
        open_store(f"redis://:secret@127.0.0.1:{free_port()}/0", StoreOptions(timeout_s=0.1))


def test_redis_key_of_another_type_is_refused(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    client.rpush(PREFIX + b"u", b"x")
    store = open_store(redis_url)
    with pytest.raises(CorruptHistory):
        store.append("u", [event(1)])
    store.close()


def every_user(store: HistoryStore, prefix: str, limit: int) -> list[str]:
    """All pages of the users with a prefix; checks the bound of each page."""
    found: list[str] = []
    after: str | None = None
    for _ in range(1000):
        page = store.users(prefix, limit, after)
        assert len(page.ids) <= limit
        found += page.ids
        if page.next is None:
            return found
        after = page.next
    raise AssertionError("the pages do not end")


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_pages_list_every_user_with_a_prefix(store: HistoryStore, limit: int) -> None:
    ids = [f"u{number:03d}" for number in range(60)] + [
        "ü/1",
        "a*",
        "a[b]",
        "ab",
        "a?",
        "a\\",
        "a^-",
    ]
    store.append_many({user: [event(1)] for user in ids})
    # Redis may repeat ids while it resizes its hash table, which the 67 keys make it do.
    assert sorted(set(every_user(store, "", limit))) == sorted(ids)
    for prefix in ("u01", "a*", "a[", "a?", "a\\", "a^", "ü"):
        wanted = {one for one in ids if one.startswith(prefix)}
        assert set(every_user(store, prefix, limit)) == wanted
    assert every_user(store, "nobody", limit) == every_user(store, "x" * 600, limit) == []


@pytest.mark.parametrize("grows", [True, False])
def test_pages_miss_nobody_while_the_database_changes(store: HistoryStore, grows: bool) -> None:
    stay, come_and_go = [[f"{name}{n:04d}" for n in range(300)] for name in "ab"]
    store.append_many({user: [event(1)] for user in (stay if grows else stay + come_and_go)})
    found: set[str] = set()
    after: str | None = None
    for number in range(len(stay) + len(come_and_go)):
        page = store.users("", 7, after)
        found.update(page.ids)
        if page.next is None:
            break
        after = page.next
        for user in come_and_go[number * 10 : (number + 1) * 10]:
            if grows:
                store.append_many({user: [event(1)]})
            else:
                store.delete(user)
    assert found >= set(stay)


def test_a_deleted_user_is_not_listed(store: HistoryStore) -> None:
    store.append_many({user: [event(1)] for user in ("a", "b")})
    store.delete("a")
    assert every_user(store, "", 10) == ["b"]


def test_redis_refuses_a_foreign_cursor(opened: Opened) -> None:
    if opened.kind == "redis":
        with pytest.raises(ValueError, match="after is 'u001'"):
            opened.open().users("", 10, "u001")


def test_a_listing_in_redis_is_bounded(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    if opened.kind != "redis":
        pytest.skip("LMDB reads no more keys than it returns")
    monkeypatch.setattr(redis_store, "SCANS", 1)
    monkeypatch.setattr(redis_store, "SCANNED", 5)
    store = opened.open()
    store.append_many({f"u{number:03d}": [event(1)] for number in range(60)})
    first = store.users("u059", 10, None)
    assert first.next is not None and len(first.ids) <= 1
    assert set(every_user(store, "u05", 3)) == {f"u05{number}" for number in range(10)}


def test_a_redis_key_of_another_type_is_damage_and_not_an_empty_history(tmp_path: Path) -> None:
    server, port = start_redis(tmp_path)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        store = open_store(url)
        store.append("good", [event(1)])
        redis.Redis.from_url(url).rpush(PREFIX + b"list", "x")
        good, other, unknown = store.get_many(["good", "list", "unknown"])
        assert isinstance(other, CorruptHistory)
        assert isinstance(good, np.ndarray) and good.size == 1
        assert isinstance(unknown, np.ndarray) and not unknown.size
        assert store.get_many([]) == []
        assert store.delete("list") and not store.get("list").size
    finally:
        server.kill()
        server.wait()


HOLD = """
import lmdb, sys
environment, held = lmdb.open(sys.argv[1], max_readers=512, map_size=16 << 20), []
try:
    while len(held) < int(sys.argv[2]):
        held.append(environment.begin())
finally:
    print(len(held), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("slots", [512, 511])
@pytest.mark.parametrize("door", ["running", "listing", "second", "copy"])
def test_slots_of_a_killed_reader_are_used_again(tmp_path: Path, door: str, slots: int) -> None:
    """By a store that was open before, by another process, and by a copy; while a reader lives they
    are in use, and the message says so."""
    url, copy = f"lmdb:{tmp_path}/store", tmp_path / "copy"
    copy.mkdir()
    others = {
        "second": "from recserve.features.history.stores import open_store as f; f = f(a).get('u')",
        "copy": "from recserve.features.history.lmdb_store import copy_store as f\n"
        "from pathlib import Path; f = [0] * f(Path(a[5:]), Path(b))",
    }
    with closing(open_store(url)) as store:
        store.append("u", [event(1)])
        held = str(slots)
        reader = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "store"), held],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None and int(reader.stdout.readline()) == slots
        if slots == 512 and door == "running":
            with pytest.raises(StoreUnavailable, match="all 512 places of readers"):
                store.get("u")
        reader.kill()
        reader.wait()
        if door in others:
            code = f"import sys; a, b = sys.argv[1:]; {others[door]}; print(len(f))"
            found = int(subprocess.check_output([sys.executable, "-c", code, url, str(copy)]))
        else:
            found = len(store.get("u") if door == "running" else store.users("", 5, None).ids)
        assert found == 1


def test_a_store_is_copied_without_opening_it_for_writing(tmp_path, monkeypatch):
    source, target, opened = tmp_path / "store", tmp_path / "copy", []
    with lmdb.open(str(source)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"user", b"events")
    target.mkdir()
    plain = lmdb.open
    monkeypatch.setattr(lmdb, "open", lambda path, **o: opened.append(o) or plain(path, **o))
    assert copy_store(source, target) == 1
    assert all(options["readonly"] and not options["create"] for options in opened)
    with plain(str(target)) as environment, environment.begin() as transaction:
        assert transaction.get(b"user") == b"events"
    with pytest.raises(StoreUnavailable, match="none"):
        copy_store(tmp_path / "none", target)
