"""Many requests at once: as many wait for the engine as keep it busy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from recserve.core.request import QueueFull
from recserve.schemas.items import RecommendRequest, RecommendResponse
from recserve.service.pending import Pending, failed

MAX_IN_FLIGHT = 64


def answered(
    begin: Callable[[RecommendRequest], Pending[RecommendResponse]],
    bodies: Iterable[RecommendRequest],
) -> list[RecommendResponse | Exception]:
    """Returns the slates in order; an invalid body yields its error.

    Args:
        begin: Starts a request.
        bodies: The requests.
    """
    answers: list[RecommendResponse | Exception] = []
    works: deque[Pending[RecommendResponse]] = deque()
    for body in bodies:
        while len(works) >= MAX_IN_FLIGHT:
            answers.append(works.popleft().outcome())
        try:
            works.append(_begun(begin, body))
        except ValueError as error:
            works.append(failed(error))
    return answers + [work.outcome() for work in works]


def _begun(
    begin: Callable[[RecommendRequest], Pending[RecommendResponse]], body: RecommendRequest
) -> Pending[RecommendResponse]:
    """Starts a request and waits while the queue is full."""
    while True:
        try:
            return begin(body)
        except QueueFull as error:
            time.sleep(min(error.retry_after_s, 0.05))
