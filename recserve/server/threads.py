"""Threads for work that must not hold the event loop, in a pool for each kind of work."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from recserve.core.errors import DeadlineExceeded
from recserve.engine.engine import Engine
from recserve.schemas.items import RankBatchRequest, RankRequest, RecommendRequest
from recserve.server.errors import NotReady

A = TypeVar("A")
# From these sizes on, a request is prepared and answered on a thread: it takes milliseconds.
LARGE_BATCH = 8
LARGE_IDS = 512
LARGE_K = 256
LARGE_VALUES = 2048  # items times fields


class Threads:
    """Pools of threads. A store that hangs, or a slow chat template, cannot exhaust the others.

    Attributes:
        store: Requests for items that wait for a stored history.
        changes: Calls that read or change events and items, and wait for the store or the disk.
        items: Large requests for items.
        text: Chat templates and tokenisation.
    """

    def __init__(self) -> None:
        self.store = ThreadPoolExecutor(32, "store")
        self.changes = ThreadPoolExecutor(32, "changes")
        self.items = ThreadPoolExecutor(4, "items")
        self.text = ThreadPoolExecutor(8, "text")

    def close(self) -> None:
        """Takes no more work. Threads end with the work that they have."""
        for pool in (self.store, self.changes, self.items, self.text):
            pool.shutdown(wait=False, cancel_futures=True)


async def on_thread(pool: ThreadPoolExecutor, function: Callable[[], A]) -> A:
    """Returns what a function returns on a thread of the pool.

    Raises:
        NotReady: If the pool takes no more work.
    """
    run = partial(contextvars.copy_context().run, function)
    try:
        result = asyncio.get_running_loop().run_in_executor(pool, run)
    except RuntimeError as error:
        raise NotReady("the server is closing") from error
    try:
        return await result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise NotReady("the server is closing") from None  # the pool dropped what had not begun


def check_first(
    engine: Engine, models: Sequence[str], deadline_s: float, function: Callable[[], A]
) -> Callable[[], A]:
    """Returns `function` behind checks that refuse a request before it is prepared.

    It raises QueueFull if the queues of all these models are full by then, or DeadlineExceeded if
    the deadline (a value of time.monotonic()) has passed.
    """

    def call() -> A:
        engine.check_queue(models)
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded("the deadline passed before the request was prepared")
        return function()

    return call


def is_large(body: object) -> bool:
    """Returns whether a request takes milliseconds to prepare or to answer."""
    match body:
        case RecommendRequest():
            ids = len(body.history or ()) + len(body.exclude.item_ids)
            shown = body.k * len(body.fields)
            large = ids > LARGE_IDS or body.k > LARGE_K or shown > LARGE_VALUES
            quota = body.diversity is not None and body.diversity.at_least is not None
            return body.filter is not None or quota or large
        case RankRequest():
            ids, shown = len(body.candidates), len(body.candidates) * len(body.fields)
            return len(body.history or ()) + ids > LARGE_IDS or shown > LARGE_VALUES
        case RankBatchRequest():
            ids = sum(len(one.candidates) for one in body.requests)
            shown = sum(len(one.candidates) * len(one.fields) for one in body.requests)
            return len(body.requests) > LARGE_BATCH or ids > LARGE_IDS or shown > LARGE_VALUES
    return False


def reads_store(body: object) -> bool:
    """Returns whether a request needs the stored history of a user."""
    match body:
        case RecommendRequest() | RankRequest():
            return body.user is not None and body.history is None
        case RankBatchRequest():
            return any(one.user is not None and one.history is None for one in body.requests)
    return False
