"""A request waits for its stored history for a limited time; a change waits for the store."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from recserve.features.history.history import (
    EVENT_DTYPE,
    CorruptHistory,
    StoreUnavailable,
)
from recserve.features.history.stores import GuardedStore
from tests.support.partial_stores import PartialStore


class GatedStore(PartialStore):
    """A store that answers while its gate is open."""

    def __init__(self):
        self.gate, self.calls, self.answer = threading.Event(), [], np.zeros(0, EVENT_DTYPE)
        self.gate.set()

    def get_many(self, user_ids):
        self.calls += user_ids
        assert self.gate.wait(60)
        if isinstance(self.answer, StoreUnavailable):
            raise self.answer
        return [self.answer for _ in user_ids]


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def store():
    store = GatedStore()
    yield store
    store.gate.set()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reads(store, clock):
    reads = GuardedStore(store, 0.02, clock=clock)
    yield reads
    store.gate.set()
    reads.close()


def refused(reads, match):
    with pytest.raises(StoreUnavailable, match=match):
        reads.read("late")


def answered(store, clock, reads):
    """Reads with a time limit that no pause of this machine reaches."""
    limit_s, reads.read_timeout_s = reads.read_timeout_s, 60.0
    try:
        assert reads.read("quick").size == 0
    finally:
        reads.read_timeout_s = limit_s


def test_a_read_ends_at_its_time_limit_although_the_store_goes_on(store, reads):
    store.gate.clear()
    refused(reads, "within 20 ms")
    assert store.calls == ["late"] and not store.gate.is_set()


def test_slow_answers_open_the_circuit_although_some_are_quick(store, clock, reads):
    """Half of the answers are slow: no five slow ones in a row are needed."""
    for _ in range(4):
        store.gate.clear()
        refused(reads, "within")
        store.gate.set()
        answered(store, clock, reads)
    assert not reads.reads[""].is_open
    store.gate.clear()
    refused(reads, "within")
    assert reads.reads[""].is_open
    store.gate.set()
    calls = len(store.calls)
    for _ in range(50):
        refused(reads, "too slow")
    assert len(store.calls) == calls


def test_one_read_per_second_tries_a_slow_store_and_an_answer_in_time_ends_that(
    store, clock, reads
):
    store.gate.clear()
    for _ in range(5):
        refused(reads, "within")
    for _ in range(2):
        clock.now_s += 1.0
        calls = len(store.calls)
        refused(reads, "within")
        refused(reads, "too slow")
        assert len(store.calls) == calls + 1
    store.gate.set()
    clock.now_s += 1.0
    answered(store, clock, reads)
    assert not reads.reads[""].is_open
    store.gate.clear()
    for _ in range(4):  # the slow answers of before no longer count
        refused(reads, "within")
    assert not reads.reads[""].is_open


def test_failures_count_too_and_damaged_histories_do_not(store, reads):
    """A client that tries again before it fails costs each request some tens of milliseconds."""
    reads.read_timeout_s = 60.0
    store.answer = CorruptHistory("damaged")
    for _ in range(20):
        with pytest.raises(CorruptHistory, match="damaged"):
            reads.read("u")
    store.answer = StoreUnavailable("refused")
    for _ in range(5):
        refused(reads, "refused")
    refused(reads, "too slow or fails")


def test_a_slow_store_still_takes_changes(store, clock):
    """Calls count failures; slow answers refuse no change."""
    reads = GuardedStore(store, 0.02, clock=clock)
    store.gate.clear()
    for _ in range(5):
        refused(reads, "within")
    store.gate.set()
    refused(reads, "too slow")
    assert reads.get("u").size == 0 and not reads.calls[""].is_open
    reads.close()


def test_a_read_that_found_no_thread_never_reaches_the_store(store, reads):
    store.gate.clear()
    reads.reads[""].most_failures = 1000
    for _ in range(40):
        refused(reads, "within")
    store.gate.set()
    reads.close()
    for thread in threading.enumerate():
        if thread.name.startswith("history_"):
            thread.join()
    assert len(store.calls) == 32


HANGING = """
import sys, threading
from types import SimpleNamespace
from recserve.features.history import stores
from recserve.features.history.history import StoreUnavailable
from recserve.service import shown
from recserve.service.histories import Histories
from tests.support.partial_stores import MemoryStore

called = threading.Event()
stores.CLOSE_S = shown.CLOSE_S = 0.05


def hang(*_):
    called.set()
    threading.Event().wait()


setattr(MemoryStore, sys.argv[1], hang)
store = stores.GuardedStore(stores.ExpiringStore(MemoryStore(), 3600.0), 0.01)
histories = SimpleNamespace(store=store, shown=shown.ShownItems(store), owns_store=True)
histories.shown.add("u", ["i"], "r")
try:
    store.read("u")
except StoreUnavailable:
    pass
if sys.argv[1] != "close":
    assert called.wait(60)
Histories.close(histories)
assert called.is_set()
"""


@pytest.mark.parametrize("method", ["get_many", "append_many", "users", "close"])
def test_a_process_ends_although_its_store_hangs(method):
    """A read, what users were shown, a sweep of expired events, or the end of the store hangs."""
    command = [sys.executable, "-c", HANGING, method]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
