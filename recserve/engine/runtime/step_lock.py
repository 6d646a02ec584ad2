"""The lock that a step holds, and whoever changes something between two steps."""

from __future__ import annotations

import threading


class StepLock:
    """A lock that goes to who waits for it.

    A plain one is often taken again by the thread that has just given it back, before the one that
    waits has woken: to forget a root could take twenty steps of a busy engine. Who takes this one
    stands in line first, and the line has one place.
    """

    def __init__(self) -> None:
        self._line, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._line:
            self._held.acquire()

    def __exit__(self, *raised: object) -> None:
        self._held.release()
