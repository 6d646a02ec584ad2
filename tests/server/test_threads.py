"""Calls on threads: the shares of clients, the deadline of a waiting call, a closing server."""

import asyncio
import threading
import time

import numpy as np
import pytest

from recserve.core.client import LOCAL, Client
from recserve.core.errors import DeadlineExceeded, QueueFull
from recserve.core.plugins import PluginExit
from recserve.server.errors import NotReady
from recserve.server.threads import FairThreads, on_thread


class Tasks:
    """Calls that run until the test lets them end, and the order in which they began."""

    def __init__(self, pool):
        self.pool, self.began, self.ends = pool, [], {}
        self._changed = threading.Condition()

    def submit(self, client, number=0, size=0):
        name = client, number
        self.ends[name] = threading.Event()
        return self.pool.submit(lambda: self._run(name), Client(client), size)

    def _run(self, name):
        with self._changed:
            self.began.append(name)
            self._changed.notify_all()
        self.ends[name].wait(60)
        return name

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.began) >= count, 60), self.began

    def settle(self):
        """Waits until every call that may begin has begun."""
        pool = self.pool
        while True:
            with pool._changed:
                if pool._choose() is None and sum(pool._running.values()) == len(self.began):
                    return
            time.sleep(0.001)

    def end_all(self):
        for end in self.ends.values():
            end.set()


@pytest.fixture
def tasks_of():
    made = []

    def make(num_threads, **options):
        made.append(Tasks(FairThreads(num_threads, "test", **options)))
        return made[-1]

    yield make
    for tasks in made:
        tasks.end_all()
        tasks.pool.shutdown()


@pytest.mark.parametrize("num_threads", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_light_client_waits_for_one_call_of_a_heavy_one(tasks_of, num_threads, share, seed):
    """However many calls of others wait, it waits for at most one call of each of them."""
    random = np.random.default_rng(seed)
    tasks = tasks_of(num_threads, share=share)
    heavy = [b"heavy-%d" % n for n in range(random.integers(1, 4))]
    for number in range(40):
        tasks.submit(heavy[random.integers(len(heavy))], number)
    tasks.settle()
    begun = list(tasks.began)
    for client in heavy:
        own = sum(one == client for one, _ in begun)
        assert own <= max(1, num_threads * share)
    tasks.submit(b"light")
    for number in range(len(heavy) + 1):
        if len(begun) == num_threads:  # a thread is free otherwise
            tasks.ends[tasks.began[number]].set()
        tasks.wait_for(len(begun) + number + 1)
        if (b"light", 0) in tasks.began:
            break
    assert (b"light", 0) in tasks.began[len(begun) : len(begun) + len(heavy) + 1]


def test_equal_clients_take_turns(tasks_of):
    tasks = tasks_of(1, share=1.0)
    tasks.submit(b"first")
    tasks.wait_for(1)
    futures = [tasks.submit(client, n) for client in (b"a", b"b", b"c") for n in range(4)]
    tasks.end_all()
    for future in futures:
        future.result(60)
    assert [client for client, _ in tasks.began[1:]] == [b"a", b"b", b"c"] * 4
    for client in (b"a", b"b", b"c"):
        assert [n for one, n in tasks.began if one == client] == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_a_small_call_overtakes_large_ones_and_a_large_one_is_served(tasks_of, seed):
    """Among calls of one client; each waits for at most one other per call before it."""
    random = np.random.default_rng(seed)
    tasks, client = tasks_of(1, share=1.0), random.choice([b"", b"client"])
    tasks.submit(client)
    tasks.wait_for(1)
    sizes = random.integers(2, 9, 20).tolist()
    sizes += [1, *random.integers(2, 9, int(random.integers(5))).tolist()]
    futures = [tasks.submit(client, 1 + n, size) for n, size in enumerate(sizes)]
    tasks.end_all()
    for future in futures:
        future.result(60)
    order = [number for _, number in tasks.began[1:]]
    assert order.index(21) < 2
    assert all(order.index(number) < 2 * number for number in range(1, 1 + len(sizes)))


def test_a_share_of_the_waiting_calls(tasks_of):
    tasks = tasks_of(1, capacity=10, share=0.5)
    tasks.submit(b"first")
    tasks.wait_for(1)
    for number in range(5):
        tasks.submit(b"heavy", number)
    with pytest.raises(QueueFull, match="5 requests of this client wait for a thread"):
        tasks.submit(b"heavy", 5)
    assert tasks.submit(b"light")
    tasks.end_all()


def test_a_late_call_is_dropped_and_a_running_one_is_not(tasks_of):
    tasks = tasks_of(1)

    async def run():
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(None, tasks.submit(b"").result)
        await loop.run_in_executor(None, tasks.wait_for, 1)
        ran = []
        with pytest.raises(DeadlineExceeded, match="before the request was prepared"):
            await on_thread(tasks.pool, lambda: ran.append(1), LOCAL, time.monotonic() + 0.01)
        done = on_thread(tasks.pool, lambda: "done", LOCAL, time.monotonic() + 60)
        own = asyncio.create_task(done)
        tasks.end_all()
        assert await own == "done" and not ran
        await running
        end = threading.Event()
        ends = on_thread(tasks.pool, end.wait, LOCAL, time.monotonic() + 0.05)
        late = asyncio.create_task(ends)
        await asyncio.sleep(0.2)
        end.set()
        assert await late is True

    asyncio.run(run())


def test_a_closed_pool_is_a_server_that_is_not_ready(tasks_of):
    """Work that comes afterwards, and work that had not begun; work that had begun is finished."""
    pool, begun, go_on = FairThreads(1, "test"), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go_on.wait(20)
        return "done"

    async def close() -> None:
        running = asyncio.create_task(on_thread(pool, work, LOCAL))
        await asyncio.to_thread(begun.wait, 20)
        queued = asyncio.create_task(on_thread(pool, work, LOCAL))
        await asyncio.sleep(0)
        pool.shutdown()
        with pytest.raises(NotReady, match="the server is closing"):
            await queued
        with pytest.raises(NotReady, match="the server is closing"):
            await on_thread(pool, work, LOCAL)
        go_on.set()
        assert await running == "done"

    asyncio.run(close())


def test_an_error_of_the_work_stays_what_it_is_and_a_cancelled_task_is_cancelled():
    pool, go_on = FairThreads(1, "test", share=1.0), threading.Event()

    def fail() -> None:
        raise RuntimeError("of its own")

    def leave() -> None:
        raise SystemExit("leaves")

    async def run() -> None:
        with pytest.raises(RuntimeError, match="of its own") as raised:
            await on_thread(pool, fail, LOCAL)
        assert not isinstance(raised.value, NotReady)
        with pytest.raises(PluginExit, match="leave"):
            await on_thread(pool, leave, LOCAL)
        task = asyncio.create_task(on_thread(pool, lambda: go_on.wait(20), LOCAL))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(run())
    pool.shutdown()
