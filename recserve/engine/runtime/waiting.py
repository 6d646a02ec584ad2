"""Requests that wait for the engine, and how they get into their lanes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from recserve.core.drafting import Strategy
from recserve.core.request import DeadlineExceeded, QueueFull, Request
from recserve.engine.runtime.delivery import AnyLane, expired, fail
from recserve.speculation.text import Drafter
from recserve.speculation.text_request import TextRequest


@dataclass
class Waiting:
    """A request that was submitted, the lane it goes to, and what it is answered with there."""

    request: Request | TextRequest
    future: Future[Any]
    submitted_s: float
    lane: AnyLane
    how: Strategy | Drafter


def line_up(queue: deque[Waiting], waiting: Waiting, most: int, seconds: float) -> None:
    """Queue a request. seconds: that one takes at present.

    Raises QueueFull where `most` are waiting.
    """
    if len(queue) >= most:
        raise QueueFull(f"{most} requests are waiting already", len(queue) * seconds)
    queue.append(waiting)


def admit(queue: deque[Waiting], max_running: int) -> None:
    """Move waiting requests into their lanes by priority, then oldest first; where one finds no
    room, those behind it on the same lane wait too, so that a large request is not starved by
    small ones. max_running: requests that share a lane.
    """
    full: set[int] = set()
    kept: list[Waiting] = []
    waiting_now = [queue.popleft() for _ in range(len(queue))]
    for waiting in sorted(waiting_now, key=_priority):
        if waiting.future.cancelled():
            continue
        if expired(waiting.request):
            fail(waiting.future, DeadlineExceeded("the deadline passed in the queue"))
            continue
        lane = waiting.lane
        if id(lane) not in full and lane.num_running < max_running:
            try:
                admitted = lane.admit(
                    waiting.request, waiting.future, waiting.submitted_s, waiting.how
                )
            except Exception as error:
                fail(waiting.future, error)
                continue
            if admitted:
                continue
        full.add(id(lane))
        kept.append(waiting)
    queue.extendleft(reversed(kept))


def _priority(waiting: Waiting) -> int:
    return waiting.request.priority if isinstance(waiting.request, TextRequest) else 0
