"""Runs work on a thread that leaves busy cores to requests."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NICENESS = 10  # added to that of the process; the scheduler then gives a tenth of a busy core


def at_low_priority(call: Callable[[], T]) -> T:
    """Runs a call on a thread of its own with a low priority, and returns its result.

    Linux has a priority for each thread; elsewhere the call has that of the process. A thread that
    the call starts inherits the low priority, so a thread that answers requests must be started
    somewhere else.

    Raises:
        Exception: The error of the call.
    """
    with ThreadPoolExecutor(1, "low-priority", initializer=_lower) as pool:
        return pool.submit(call).result()


def _lower() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
