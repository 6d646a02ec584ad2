"""Waits for a condition that another thread or process makes true."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Polls until the condition is true.

    Raises:
        AssertionError: If it is still false after `seconds`.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {seconds:g} s"
        time.sleep(0.01)
