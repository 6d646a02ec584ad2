"""Counts in Redis at each kind of address, and by a user with the rights that the guide names."""

import numpy as np
import pytest

from recserve.features.catalog.redis_popularity import COUNT, RedisPopularity
from recserve.features.redis_connection import CLUSTER_RIGHTS, RIGHTS, connect
from recserve.features.shared_counts import Layout, SharedCounts
from tests.support.redis_server import servers, start_cluster, start_redis, start_sentinel

PLACE = np.dtype([("place", "<i4"), ("amount", "<i8")])


@pytest.fixture(params=["rights", "sentinel", "cluster"])
def url(request, tmp_path):
    with servers() as started:
        if request.param == "sentinel":
            yield f"redis+sentinel://{start_sentinel(tmp_path, started)[0]}/shop"
        elif request.param == "cluster":
            yield f"redis+cluster://{start_cluster(tmp_path, started)[0]}"
        else:
            server, port = start_redis(tmp_path)
            started.append(server)
            admin = connect(f"redis://127.0.0.1:{port}")
            rights = (*RIGHTS, *CLUSTER_RIGHTS)
            admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *rights)
            admin.close()
            yield f"redis://shop:secret@127.0.0.1:{port}"


def test_counts_and_switch(url):
    layout = Layout(20, 6, 10, 1000, 4)
    wait = int("sentinel" in url)
    one, other = (
        SharedCounts(connect(url, timeout_s=2.0), "shop/fast", layout, name, wait)
        for name in ("one", "other")
    )
    delta = np.array([(1, 3), (15, 2)], PLACE).tobytes()
    member = (5).to_bytes(4, "little") + b"a hash 1"
    empty = {"sequence": 0, "weight": 0, "acknowledged": 0, "increments": b"", "members": b""}
    known = {"version": 0, "state": b"", "first_slice": 0, "last": False}
    full = {"sequence": 1, "weight": 3, "increments": delta, "members": member}
    for _ in range(3):
        found = one.exchange(**{**empty, **full}, **known)
    assert found.head.tolist() == [0, 3, 0, 0, 0, 1] and found.version == 0
    assert sum(found.slices.values()).tolist() == [0, 3, 0, 0, 0, 0, 0, 0, 0, 0]
    other.exchange(**{**empty, **full}, **known)
    for board in (one, other, one):
        board.count([(b"click 1.", 12), (b"click 2.", 13)])
    assert one.switch(0, b"running") and not other.switch(0, b"other") and one.switch(0, b"running")
    assert other.switch(1, b"again", restarts=True)
    found = one.exchange(**empty, **known)
    assert (found.version, found.state, found.slices) == (2, b"again", {})
    sums = other.read(["0", "1"], {"1": b"first"})
    assert other.read(["1"], {"1": b"second"}).notes == {"1": b"first"}
    assert sums.now.tolist() == sums.before.tolist()
    assert sums.now[[1, 5, 12, 13, 15]].tolist() == [6, 1, 1, 1, 4]
    assert (sums.lost, sums.killed, sums.num_writers, sums.notes["0"]) == (0, 0, 2, b"")
    for board in (one, other):
        board.close()


def test_an_exchange_without_news_writes_nothing(redis_url, empty_redis):
    """Redis appends each write to its file, so thousands of calls must not."""
    board = SharedCounts(connect(redis_url), "shop/fast", Layout(20, 6, 10, 1000, 4), "one")
    popular = RedisPopularity(connect(redis_url), "shop", 3600.0, "one", "server")
    empty = {"sequence": 0, "weight": 0, "acknowledged": 0, "increments": b"", "members": b""}

    def call():
        board.exchange(**empty, version=0, state=b"", first_slice=0, last=False)
        popular.exchange(0, 0, 0, b"", 0)

    call()
    before = empty_redis.info("persistence")["rdb_changes_since_last_save"]
    for _ in range(20):
        call()
    assert empty_redis.info("persistence")["rdb_changes_since_last_save"] == before
    keys = list(empty_redis.scan_iter())
    assert keys and all(empty_redis.pttl(key) > 89 * 86_400_000 for key in keys)
    board.close()
    popular.close()


def test_popular_items(url):
    client = connect(url, timeout_s=2.0)
    store = RedisPopularity(client, "shop", 3600.0, "one", "server")
    begin = store.exchange(0, 0, 0, b"", 0)
    counts = np.array([(7, 1.0), (2**63, 0.5)], COUNT).tobytes()
    for _ in range(2):
        found = store.exchange(1, begin.since_us, begin.since_us, counts, 0)
    assert dict(zip(found.keys.tolist(), found.counts.tolist(), strict=True)) == {7: 1, 2**63: 0.5}
    assert found.begin_us == begin.begin_us and found.reached == found.version == 1
    store.close()
