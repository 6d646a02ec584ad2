"""Several servers count events for `popular` in Redis: one order, that of one process."""

import contextlib
import random

import numpy as np
import pytest

from recserve.features.catalog import redis_popularity
from recserve.features.catalog.popularity import Popularity
from recserve.features.catalog.redis_popularity import PopularityUnavailable, RedisPopularity
from recserve.features.redis_connection import connect
from recserve.service import Service, ServiceOptions
from recserve.service.options import CatalogLogOptions
from recserve.service.shared_popularity import SharedPopularity
from tests.support.live_catalogues import base_of, item_like, put
from tests.support.tiny_bundle import shared_bundle

HOUR_US = 3600 * 10**6


class Items:
    """Items 0 to `size`, whose keys are 100 more than their rows."""

    def __init__(self, size):
        self.size = size

    def rows_of_keys(self, keys):
        rows = keys.astype(np.int64) - 100
        return np.where(rows < self.size, rows, -1)

    def first_rows(self, rows):
        return rows


class Network:
    """Counts behind a network that repeats calls and loses replies."""

    def __init__(self, store, drawn):
        self.store, self.drawn, self.faults, self.arrived = store, drawn, 0.3, False

    def exchange(self, *arguments):
        self.arrived = False
        if self.drawn.random() < self.faults:
            raise PopularityUnavailable("not sent")
        found = self.store.exchange(*arguments)
        self.arrived = True
        while self.drawn.random() < self.faults:
            found = self.store.exchange(*arguments)
        if self.drawn.random() < self.faults:
            raise PopularityUnavailable("the reply is lost")
        return found


@pytest.fixture
def new_server(empty_redis, redis_url):
    clients = []

    def start(trained, items, drawn, bundle="one"):
        clients.append(connect(redis_url))
        store = RedisPopularity(clients[-1], "test", 3600.0, bundle, f"server-{len(clients)}")
        one = SharedPopularity(Network(store, drawn), Popularity(trained, 3600.0), lambda: items)
        one.items, one.popularity, one.network = items, one._popularity, one._store
        return one

    yield start
    for client in clients:
        client.close()


def settle(one):
    one.network.faults = 0.0
    one.exchange()


@pytest.mark.parametrize("pause_us", [600 * HOUR_US, 5000 * HOUR_US])
@pytest.mark.parametrize("seed", range(3))
def test_all_servers_have_the_counts_of_one_process(new_server, monkeypatch, seed, pause_us):
    """For drawn events and pauses, lost replies, servers that start late, and new items."""
    monkeypatch.setattr(redis_popularity, "PAGE", 7)
    drawn, draw = random.Random(seed), np.random.default_rng(seed)
    trained = draw.integers(0, 4, 30).astype(float)
    servers = [new_server(trained, Items(30), drawn) for _ in range(3)]
    settle(servers[0])
    begin_us = servers[0].popularity.latest_us
    oracle = Popularity(trained, 3600.0, begin_us)
    now_us, size, waiting = begin_us, 30, {one: [] for one in servers}
    for _ in range(150):
        one = drawn.choice(servers)
        now_us += int(drawn.expovariate(1) * HOUR_US) if drawn.random() < 0.97 else pause_us
        size += drawn.random() < 0.1
        one.items.size = size  # others get the item later
        rows = draw.integers(0, one.items.size, int(draw.integers(1, 9)))
        times = now_us - draw.integers(0, 3 * HOUR_US, rows.size)
        weights = draw.choice([0, 0.5, 3], rows.size) if drawn.random() < 0.5 else None
        one.add((rows + 100).tolist(), times.tolist(), weights)
        waiting[one].append((rows, times, weights))
        each = drawn.choice(servers)
        each.network.faults = 0.3
        in_delta = [] if each._delta else list(waiting[each])
        with contextlib.suppress(PopularityUnavailable):
            each.exchange()
        if in_delta and not each._keys:
            for events in in_delta:
                oracle.count(*events)
            waiting[each].clear()
        if drawn.random() < 0.03:
            servers.append(new_server(trained, Items(30), drawn))
            waiting[servers[-1]] = []
    for one in servers:
        one.items.size = size
        settle(one)
        for events in waiting[one]:
            oracle.count(*events)
    every, orders = np.arange(size), []
    oracle.extend(size)
    for one in servers:
        settle(one)
        settle(one)
        one.popularity.extend(size)
        np.testing.assert_allclose(
            one.popularity.at(every), oracle.at(every), rtol=1e-6, atol=1e-90
        )
        orders.append(one.popularity.best(size).tolist())
    assert all(order == orders[0] for order in orders)
    counts = oracle.at(every)[orders[0]]
    assert (counts[1:] <= counts[:-1] * (1 + 1e-9) + 1e-90).all()


def test_a_bundle_that_comes_late_counts_from_its_begin(new_server, empty_redis):
    """However many half-lives lie between, and without an event."""
    drawn, trained = random.Random(0), np.array([3.0, 2.0, 1.0])
    one = new_server(trained, Items(3), drawn)
    settle(one)
    (meta,) = empty_redis.scan_iter("*:meta")
    for field in (b"since", b"begin:one"):
        empty_redis.hincrby(meta, field, -3000 * HOUR_US)
    two = new_server(trained, Items(3), drawn, "two")
    for each in (one, two, one):
        settle(each)
    np.testing.assert_allclose(two.popularity.at(np.arange(3)), trained)
    two.add([102, 102], [two.popularity.latest_us] * 2)
    for each in (two, one):
        settle(each)
    assert two.popularity.best(3).tolist() == [0, 2, 1] and one.popularity.best(1).tolist() == [2]


def test_a_redis_that_has_lost_counts_is_read_again(new_server, empty_redis):
    drawn = random.Random(0)
    trained = np.array([3.0, 2.0, 1.0])
    one, other = (new_server(trained, Items(3), drawn) for _ in range(2))
    for each in (one, other):
        settle(each)
    now_us = one.popularity.latest_us
    one.add([102], [now_us])
    settle(one)
    saved = {key: empty_redis.dump(key) for key in empty_redis.scan_iter()}
    other.add([102, 102, 102], [now_us] * 3)
    for each in (other, one):
        settle(each)
    assert one.popularity.best(3).tolist() == other.popularity.best(3).tolist() == [2, 0, 1]
    for key, value in saved.items():
        empty_redis.restore(key, 0, value, replace=True)
    for each in (other, one):
        settle(each)
        assert each.popularity.best(3).tolist() == [0, 1, 2]  # 3, 2, 2: in order of the rows


def test_servers_of_one_catalogue_have_one_list(redis_url, empty_redis, tmp_path):
    """An event on one server counts on all, also on one that starts later, and of new items."""
    services = []

    def start():
        place = CatalogLogOptions(redis_url, "shop")
        options = ServiceOptions(catalog_log=place)
        store = f"lmdb:{tmp_path}/store{len(services)}"
        services.append(Service.open(shared_bundle(), store, "cpu", options))
        return services[-1]

    def popular(service):
        for one in services:
            one.catalog.catch_up()
            one.catalog.shared_counts.exchange()
        return [item.item_id for item in service.recommend({"strategy": "popular", "k": 50}).items]

    def view(service, item_id, times):
        events = [{"user_id": f"{len(services)}-{n}", "item_id": item_id} for n in range(times)]
        assert service.add_events({"events": events}).accepted == times

    try:
        one, other = start(), start()
        trained, ids = base_of(one).popularity, base_of(one).items.ids
        before, rare = popular(one), ids[int(np.argmin(trained))]
        assert popular(other) == before
        view(one, rare, int(trained.max()) + 5)
        put(other, item_like(other, "new"))
        popular(one)
        view(one, "new", int(trained.max()) + 20)
        wanted = ["new", rare, *before][:50]
        assert popular(other) == popular(one) == popular(start()) == wanted
        assert len({service.item(rare).popularity for service in services}) == 1
    finally:
        for service in services:
            service.close()
