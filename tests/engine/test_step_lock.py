"""The lock of a step goes to whoever waits for it."""

import threading
import time

import pytest

from recserve.engine.runtime.scheduler import StepLock


def test_who_waits_comes_before_who_had_it():
    for _ in range(20):
        lock, order = StepLock(), []

        def wait(lock=lock, order=order):
            with lock:
                order.append("who waited")

        waiting = threading.Thread(target=wait)
        with lock:
            waiting.start()
            until = time.monotonic() + 10
            while not lock._line.locked():
                assert time.monotonic() < until
        with lock:
            order.append("who had it")
        waiting.join()
        assert order == ["who waited", "who had it"]


def test_it_is_given_back_after_an_error():
    lock = StepLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    taken = threading.Thread(target=lock.__enter__, daemon=True)
    taken.start()
    taken.join(10)
    assert not taken.is_alive()
