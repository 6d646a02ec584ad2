"""The lock of a step is fair: a waiting thread gets it next."""

import threading
import time

import pytest

from recserve.engine.scheduler import StepLock


def test_a_waiting_thread_gets_the_lock_before_its_last_holder():
    for _ in range(20):
        lock, order = StepLock(), []

        def wait(lock=lock, order=order):
            with lock:
                order.append("waiting thread")

        waiting = threading.Thread(target=wait)
        with lock:
            waiting.start()
            until = time.monotonic() + 10
            while not lock._line.locked():
                assert time.monotonic() < until
        with lock:
            order.append("previous holder")
        waiting.join()
        assert order == ["waiting thread", "previous holder"]


def test_it_is_given_back_after_an_error():
    lock = StepLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    taken = threading.Thread(target=lock.__enter__, daemon=True)
    taken.start()
    taken.join(10)
    assert not taken.is_alive()
