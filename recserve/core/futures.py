"""Waits for several results that are of use only together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
