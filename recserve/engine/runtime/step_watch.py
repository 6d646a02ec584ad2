"""Measures how long the engine's current step has been running."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepWatch:
    """The time since the engine's last sign of progress. One thread notes it, any thread reads it.

    A step that hangs, for example in a kernel that never ends, makes `seconds` grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None

    def note_step(self) -> None:
        """Notes that a step begins, or that one has ended and the next one begins."""
        self._since_s = self._clock()

    def idle(self) -> None:
        """Notes that no step runs."""
        self._since_s = None

    @property
    def seconds(self) -> float:
        """Seconds since the current step began; 0 while no step runs."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s
