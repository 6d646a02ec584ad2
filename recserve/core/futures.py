"""Results of the engine: their futures, and the wait for several that are of use only together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from recserve.core.plugins import request_error

log = logging.getLogger(__name__)
T = TypeVar("T")


class ResultFuture(Future[T]):
    """A future whose callbacks cannot end the thread that completes it.

    Python's own future contains only what `except Exception` catches. A callback that raises
    SystemExit would end the engine's thread, and the callbacks after it would not be called.
    """

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """As the base class's own."""

        def call(future: Future[T]) -> None:
            try:
                fn(future)
            except BaseException as error:
                log.error("a callback of a result failed", exc_info=request_error(error))

        super().add_done_callback(call)


def wait_all(futures: Sequence[Future[T]]) -> list[T]:
    """Returns the results. If one fails, or the wait is interrupted, the others are cancelled.

    Raises:
        BaseException: The first error in the order of the futures.
    """
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
