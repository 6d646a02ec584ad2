"""The time limit of a training command, from its start to its last file."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

Clock = Literal["wall", "processor"]


@dataclass(frozen=True)
class TimeLimit:
    """A point in time at which a command ends its work.

    Attributes:
        end_s: The point in time on the clock; infinity without a limit.
        clock: What is counted. `processor`: the process's time on the processor.
    """

    end_s: float = math.inf
    clock: Clock = "wall"

    @staticmethod
    def of(minutes: float | None, clock: Clock = "wall") -> TimeLimit:
        """Returns a limit of so many minutes from now on; None means no limit."""
        limit = TimeLimit(clock=clock)
        return limit if minutes is None else TimeLimit(limit.now() + 60 * minutes, clock)

    def now(self) -> float:
        """Returns the present time on the clock, in seconds."""
        return time.process_time() if self.clock == "processor" else time.monotonic()

    @property
    def exists(self) -> bool:
        """True if there is a limit."""
        return self.end_s < math.inf

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0; infinity without a limit."""
        return max(self.end_s - self.now(), 0.0) if self.exists else math.inf

    @property
    def is_over(self) -> bool:
        """True if no time is left."""
        return self.left_s <= 0

    def part(self, share: float) -> TimeLimit:
        """Returns the limit that ends after this share of the time left."""
        return TimeLimit(self.now() + share * self.left_s, self.clock) if self.exists else self


NO_LIMIT = TimeLimit()
