"""Work on threads while a server closes."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from recserve.server.errors import NotReady
from recserve.server.threads import on_thread


def test_a_closed_pool_is_a_server_that_is_not_ready():
    """Work that comes afterwards, and work that had not begun; work that had begun is finished."""
    pool, begun, go_on = ThreadPoolExecutor(1), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go_on.wait(20)
        return "done"

    async def close() -> None:
        running = asyncio.create_task(on_thread(pool, work))
        await asyncio.to_thread(begun.wait, 20)
        queued = asyncio.create_task(on_thread(pool, work))
        await asyncio.sleep(0)
        pool.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(NotReady, match="the server is closing"):
            await queued
        with pytest.raises(NotReady, match="the server is closing"):
            await on_thread(pool, work)
        go_on.set()
        assert await running == "done"

    asyncio.run(close())


def test_an_error_of_the_work_stays_what_it_is_and_a_cancelled_task_is_cancelled():
    pool, go_on = ThreadPoolExecutor(1), threading.Event()

    def fail() -> None:
        raise RuntimeError("of its own")

    async def run() -> None:
        with pytest.raises(RuntimeError, match="of its own") as raised:
            await on_thread(pool, fail)
        assert not isinstance(raised.value, NotReady)
        task = asyncio.create_task(on_thread(pool, lambda: go_on.wait(20)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(run())
    pool.shutdown()
