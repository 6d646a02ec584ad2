"""A store that hangs is not called again and again; one that fails quickly is."""

import numpy as np
import pytest

from recserve.features.history.history import EVENT_DTYPE, StoreUnavailable
from recserve.features.history.stores import SLOW_S, GuardedStore
from tests.support.partial_stores import PartialStore


class Store(PartialStore):
    """Fails after `takes_s` seconds of the test's clock, or answers."""

    def __init__(self):
        self.now_s, self.takes_s, self.broken, self.calls = 100.0, 0.25, True, 0

    def get_many(self, user_ids):
        self.calls += 1
        self.now_s += self.takes_s
        if self.broken:
            raise StoreUnavailable("it hangs")
        return [np.zeros(0, EVENT_DTYPE) for _ in user_ids]

    def delete(self, user_id):
        return bool(self.get_many([user_id]))


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def breaker(store):
    return GuardedStore(store, clock=lambda: store.now_s)


def fails(call):
    with pytest.raises(StoreUnavailable):
        call()


def test_it_opens_after_slow_failures_in_a_row_and_probes_once_a_second(store, breaker):
    for _ in range(5):
        fails(lambda: breaker.get("u"))
    assert store.calls == 5
    for _ in range(50):
        fails(lambda: breaker.get("u"))
        fails(lambda: breaker.delete("u"))
    assert store.calls == 5
    store.now_s += 1.0
    fails(lambda: breaker.get("u"))
    fails(lambda: breaker.get("u"))
    assert store.calls == 6
    store.broken = False
    fails(lambda: breaker.get("u"))
    store.now_s += 1.0
    assert breaker.get("u").size == 0 and breaker.get("u").size == 0
    assert store.calls == 8


def test_a_success_between_failures_keeps_it_closed(store, breaker):
    for _ in range(4):
        for _ in range(4):
            fails(lambda: breaker.get("u"))
        store.broken = False
        breaker.get("u")
        store.broken = True
    assert store.calls == 20


def test_quick_failures_keep_it_closed(store, breaker):
    """A refused connection costs nothing, and the store is back as soon as it is started."""
    store.takes_s = SLOW_S / 2
    for _ in range(20):
        fails(lambda: breaker.get("u"))
    assert store.calls == 20


def test_other_errors_are_not_its_business(breaker, store, monkeypatch):
    def wrong(_):
        raise ValueError("user id")

    monkeypatch.setattr(store, "get_many", wrong)
    for _ in range(20):
        with pytest.raises(ValueError, match="user id"):
            breaker.get("u")
