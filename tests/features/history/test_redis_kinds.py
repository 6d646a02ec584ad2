"""Redis as people run it: kinds of deployment and doors of the store, on real servers."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import redis

from recserve.bundle.bundle import Bundle
from recserve.cli.doctor import without_password
from recserve.features.catalog.catalog_log import JournalError
from recserve.features.catalog.redis_log import RedisCatalogLog
from recserve.features.catalog.versions import ChangeSet
from recserve.features.history import redis_store
from recserve.features.history.history import (
    Applied,
    CorruptHistory,
    HistoryStore,
    StoredEvent,
    StoreOptions,
    StoreUnavailable,
    pack,
    records,
)
from recserve.features.history.redis_store import PREFIX
from recserve.features.history.stores import open_store
from recserve.features.redis_connection import CLUSTER_RIGHTS, FAILURES, RIGHTS, connect, describe
from tests.support.redis_server import (
    make_certificate,
    servers,
    start_cluster,
    start_redis,
    start_sentinel,
    wait_for,
)
from tests.support.tiny_bundle import shared_bundle

KINDS = ("acl", "unix", "tls", "client certificate", "sentinel", "cluster")
PASSWORD, WRITTEN = "p/a?s#s@:%1", "p%2Fa%3Fs%23s%40%3A%251"


def event(number: int) -> StoredEvent:
    return StoredEvent(number, number, number)


def start(kind: str, folder: Path, started: list) -> tuple[str, redis.Redis]:
    """Starts a deployment; returns its URL and a client that writes today's keys."""
    tls = kind in ("tls", "client certificate")
    more = make_certificate(folder) if tls else []
    if kind == "sentinel":
        address, port = start_sentinel(folder, started)
        return f"redis+sentinel://{address}/shop/2", redis.Redis(port=port, db=2)
    if kind == "cluster":
        address, ports = start_cluster(folder, started)
        return f"redis+cluster://{address}", redis.RedisCluster(port=ports[0], host="127.0.0.1")
    if kind == "unix":
        path = folder / "redis.sock"
        more += ["--unixsocket", str(path)]
    if tls:
        more += ["--tls-auth-clients", "yes" if "client" in kind else "no"]
    server, port = start_redis(folder, 0, *more)
    started.append(server)
    plain = redis.Redis(port=port)
    if kind == "unix":
        wait_for(path.exists, "no socket")
        return f"unix://{path}?db=3", redis.Redis(port=port, db=3)
    if kind == "acl":
        plain.execute_command("ACL SETUSER", "shop", "on", f">{PASSWORD}", *RIGHTS)
        return f"redis://shop:{WRITTEN}@127.0.0.1:{port}/0", plain
    if tls:
        plain.config_set("tls-port", own := port + 16384)
        options = f"ssl_ca_certs={folder}/tls.pem"
        if "client" in kind:
            options += f"&ssl_certfile={folder}/tls.pem&ssl_keyfile={folder}/tls.key"
        return f"rediss://127.0.0.1:{own}/0?{options}", plain
    raise AssertionError(kind)


def every_user(store: HistoryStore, limit: int) -> list[str]:
    found, after = [], None
    while True:
        page = store.users("", limit, after)
        found += page.ids
        if (after := page.next) is None:
            return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_redis_keeps_what_every_door_stores(kind, tmp_path, monkeypatch):
    """Keys of a plain client are read, and scripts and pipelines reach every slot."""
    rng = random.Random(kind)
    monkeypatch.setattr(redis_store, "SCANNED", 5)
    with servers() as started:
        url, plain = start(kind, tmp_path, started)
        ids = [f"u{rng.random()}" for _ in range(30)] + ["{a}b", "{", "ü/1"]
        for user in ids:
            plain.set(PREFIX + user.encode(), pack(records([event(1)])))
        store = open_store(url, StoreOptions(cap=4, timeout_s=2))
        assert all(found["event_key"].tolist() == [1] for found in store.get_many(ids))
        if kind == "cluster":  # one server lost its scripts: no event counts twice
            node = plain.get_primaries()[1]
            redis.Redis(node.host, node.port).script_flush()
        else:
            plain.script_flush()
        changed = {user: [event(1), event(2)] for user in ids}
        assert store.append_many(changed) == {user: Applied([False, True]) for user in ids}
        assert store.append("new", [event(5)]) == [True] and store.delete("new")
        assert not store.delete("new")
        assert sorted(set(every_user(store, 7))) == sorted(ids)
        plain.delete(PREFIX + ids[0].encode())
        plain.rpush(PREFIX + ids[0].encode(), "x")
        found = store.get_many(ids)
        assert isinstance(found[0], CorruptHistory)
        assert [len(one) for one in found[1:]] == [2] * (len(ids) - 1)
        if kind == "cluster":  # redis-py would ask once per script where its key is
            nodes = [redis.Redis(one.host, one.port) for one in plain.get_primaries()]
            assert not any("cmdstat_command|getkeys" in one.info("commandstats") for one in nodes)
        if kind in ("sentinel", "cluster"):
            with pytest.raises(ValueError, match="no primary now"):
                store.users("", 5, "00000000-0")
        store.close()


def test_a_cluster_moves_a_slot_and_nothing_is_lost(tmp_path):
    with servers() as started:
        url, plain = start("cluster", tmp_path, started)
        store = open_store(url)
        users = [f"u{number}" for number in range(20)]
        assert store.append_many({user: [event(1)] for user in users})
        key = PREFIX + b"u7"
        slot = plain.keyslot(key)
        source = plain.get_node_from_key(key)
        target = next(node for node in plain.get_primaries() if node != source)
        own = {one.name: redis.Redis(one.host, one.port) for one in plain.get_primaries()}
        ids = {name: client.execute_command("CLUSTER MYID") for name, client in own.items()}
        there, here = own[target.name], own[source.name]
        there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source.name])
        here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target.name])
        here.migrate("127.0.0.1", target.port, key, 0, 1000)
        assert store.append("u7", [event(2)]) == [True]  # ASK
        for client in own.values():
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target.name])
        assert store.append("u7", [event(3)]) == [True]  # MOVED
        found = store.get_many(users)
        assert [len(one) for one in found] == [3 if user == "u7" else 1 for user in users]
        store.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_node_fails_its_own_users_only(how, tmp_path):
    """In a batch, one by one, and after the circuits of the dead node have opened."""
    with servers() as started:
        url, plain = start("cluster", tmp_path, started)
        for one in plain.get_primaries():
            redis.Redis(one.host, one.port).config_set("cluster-require-full-coverage", "no")
        store = open_store(url, StoreOptions(timeout_s=0.1, read_timeout_s=1))
        users = [f"u{number}" for number in range(30)]
        store.append_many({user: [event(1)] for user in users})
        dead = plain.get_primaries()[1]
        lost = {user for user in users if plain.get_node_from_key(PREFIX + user.encode()) == dead}
        assert 0 < len(lost) < len(users)
        (server,) = (one for one in started if str(dead.port) in one.args)
        server.send_signal(how)

        def outcome(ask):
            try:
                return type(ask())
            except StoreUnavailable:
                return StoreUnavailable

        expected = [StoreUnavailable if user in lost else np.ndarray for user in users]
        for _ in range(2):
            assert [type(one) for one in store.get_many(users)] == expected
            assert [outcome(lambda user=user: store.get(user)) for user in users] == expected
            assert [outcome(lambda user=user: store.read(user)) for user in users] == expected
            for user in users:
                change = outcome(lambda user=user: store.append(user, [event(1)]))
                assert change is (StoreUnavailable if user in lost else list)
        other = open_store(url, StoreOptions(timeout_s=0.1))  # a server that starts meanwhile
        assert len(other.get(next(user for user in users if user not in lost))) == 1
        other.close()
        store.close()


@pytest.mark.parametrize("missing", [*RIGHTS, *CLUSTER_RIGHTS])
def test_a_right_that_an_acl_user_lacks_is_named(missing, tmp_path):
    """Each right of the list is needed, no more are, and a call that lacks one lists them."""
    with servers() as started:
        if missing in CLUSTER_RIGHTS:
            _, ports = start_cluster(tmp_path, started)
            scheme, path, rights = "redis+cluster", "", [*RIGHTS, *CLUSTER_RIGHTS]
        else:
            server, port = start_redis(tmp_path)
            started.append(server)
            scheme, path, ports, rights = "redis", "/2", [port], [*RIGHTS]
        url = f"{scheme}://shop:{WRITTEN}@127.0.0.1:{ports[0]}{path}"
        catalog = Bundle.open(shared_bundle()).catalog()

        def histories():
            store = open_store(url)
            yield store.append("u", [event(1)])
            yield store.get("u")
            yield store.users("", 5, None)
            yield store.delete("u")

        def log():
            log = RedisCatalogLog(connect(url, wait_s=1), catalog)
            yield log.read()
            yield (stored := log.append(ChangeSet(1)))
            yield log.wait(1, 0.01)
            yield log.replace([stored.change_set])

        def errors(rights):
            for port in ports:
                plain = redis.Redis(port=port)
                plain.execute_command("ACL SETUSER", "shop", "reset", "on", f">{PASSWORD}", *rights)
                plain.flushall()
                plain.script_flush()
            found = []
            for calls in (histories, log):
                try:
                    assert len(list(calls())) == 4
                except (StoreUnavailable, JournalError) as error:
                    found.append(str(error))
                except FAILURES as error:  # of `connect`
                    found.append(describe(error))
            return found

        assert errors(rights) == []
        assert errors(["~recserve:*", "+@all"]) == []
        named = errors([right for right in rights if right != missing])
        assert named and all(" ".join(RIGHTS) in error for error in named), named


def test_a_demoted_primary_is_left(tmp_path):
    """One address whose server changed under it answers READONLY once."""
    with servers() as started:
        server, port = start_redis(tmp_path)
        started.append(server)
        client = connect(f"redis://127.0.0.1:{port}")
        store = open_store(f"redis://127.0.0.1:{port}")
        assert store.append("u", [event(1)]) == [True]
        client.config_set("replica-serve-stale-data", "yes")
        client.replicaof("127.0.0.1", "1")
        with pytest.raises(StoreUnavailable, match="(?i)read only"):
            store.append("u", [event(2)])
        client.replicaof("NO", "ONE")
        assert store.append("u", [event(2)]) == [True]
        store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+tls://h", "scheme.*expected lmdb"),
        ("redis+sentinel://h:1,g:2", "service is missing"),
        ("redis+sentinel://h:1//3", "service is missing"),
        ("redis+sentinel://h/shop/x", "db is 'x'"),
        ("redis+cluster://h:1/1", "db is 1.*database 0"),
        ("rediss+cluster://h:1?db=2", "db is 2.*database 0"),
        ("redis+cluster://h:1?health_check_interval=1", "health_check_interval.*cluster"),
        ("redis+cluster://,h:1", "host is missing"),
        ("redis://a:1,b:2/0", "2 hosts"),
        ("redis://h:1/x", "db is 'x'"),
        ("redis://h:1?ssl_ca_certs=/x", "ssl_ca_certs needs TLS"),
        ("rediss://h:1?ssl_ca_certs=/no/file", "ssl_ca_certs is /no/file"),
        ("rediss://h:1?ssl_cert_reqs=maybe", "ssl_cert_reqs is maybe"),
        ("redis://h:1?sentinel_password=secret", "sentinel_password needs Sentinel"),
        ("redis://h:1?socket_timeout=soon", "socket_timeout"),
        ("redis://h:1?colour=red", "option colour is unknown"),
        ("redis://h:99999", "port"),
        ("redis://me:sec/ret@h:1/0", "percent|%2F"),
        ("redis://me:sec?ret@h:1/0", "%2F"),
        ("redis://me:sec#ret@h:1/0", "%2F"),
        ("redis://me:sec/r=@h:1/0", "%2F"),
        ("unix://host", "unix:///PATH"),
    ],
)
def test_urls_are_refused_by_the_name_of_the_field(url, message):
    with pytest.raises(ValueError, match=message) as refused:
        open_store(url)
    assert "sec" not in str(refused.value).replace("seconds", "")


@pytest.mark.parametrize(
    "url", ["redis://me:{}@h:1/0", "redis+sentinel://me:{}@h:1,g:2/s?sentinel_password={}"]
)
@pytest.mark.parametrize("password", [WRITTEN, "secret", "se/cr@et"])
def test_no_password_is_shown(url, password):
    shown = without_password(url.format(password, password))
    assert password not in shown and "cr@et" not in shown and "***" in shown


def test_a_wrong_password_is_not_in_the_error(tmp_path):
    with servers() as started:
        server, port = start_redis(tmp_path, 0, "--requirepass", "right")
        started.append(server)
        with pytest.raises(StoreUnavailable) as refused:
            open_store(f"redis://me:topsecret@127.0.0.1:{port}")
        assert "topsecret" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_failover_under_load_loses_no_acknowledged_event_that_was_replicated(how, tmp_path):
    """Writers go on by themselves on the new primary; each refusal is StoreUnavailable."""
    with servers() as started:
        address, port = start_sentinel(tmp_path, started)
        store = open_store(f"redis+sentinel://{address}/shop/0", StoreOptions(cap=4000))
        primary = redis.Redis(port=port)
        taken: dict[int, list[int]] = {number: [] for number in range(3)}
        refusals, done = [], threading.Event()

        def write(number: int) -> None:
            key = 0
            while not done.is_set():
                key += 1
                try:
                    store.append(f"u{number}", [event(key)])
                    taken[number].append(key)
                    time.sleep(0.005)  # the history stays below its cap
                except StoreUnavailable as error:
                    refusals.append(str(error))
                    time.sleep(0.05)

        threads = [threading.Thread(target=write, args=(number,)) for number in taken]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        before = {number: list(keys) for number, keys in taken.items()}
        primary.set("mark", 1)  # WAIT waits for what its own connection wrote
        assert primary.wait(1, 5000) == 1
        os.kill(started[0].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        wait_for(lambda: len(refusals) > 2, "nothing was refused")
        marks = {number: len(keys) for number, keys in taken.items()}
        wait_for(
            lambda: all(len(taken[number]) > marks[number] + 20 for number in taken),
            "no writes after the failover",
        )
        started[0].send_signal(signal.SIGCONT)
        done.set()
        for thread in threads:
            thread.join()
        for number, keys in before.items():
            found = store.get(f"u{number}")
            assert isinstance(found, np.ndarray)
            assert set(keys) <= set(found["event_key"].tolist())
        store.close()


@pytest.mark.parametrize("kind", ["acl", "unix", "sentinel", "cluster"])
def test_a_reply_of_a_client_that_waits_may_take_as_long(kind, tmp_path):
    """A wait that is longer than the time limit of replies ends with its own time."""
    with servers() as started:
        url, _ = start(kind, tmp_path, started)
        log = RedisCatalogLog(
            connect(url, timeout_s=0.2, wait_s=1), Bundle.open(shared_bundle()).catalog()
        )
        assert not log.wait(1, 0.6)
        log.close()
