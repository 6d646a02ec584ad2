"""What work costs on this machine: measured at some sizes, interpolated between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Milliseconds at ascending sizes; between them and after the last it is taken as linear."""

    sizes: tuple[int, ...]
    milliseconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        """Milliseconds, 0 for nothing."""
        if size <= 0:
            return 0.0
        last = max(sum(known <= size for known in self.sizes[:-1]), 1)
        if len(self.sizes) == 1:
            return self.milliseconds[0] * max(size / self.sizes[0], 1.0)
        (low, high), (before, after) = (
            self.sizes[last - 1 : last + 1],
            self.milliseconds[last - 1 : last + 1],
        )
        slope = max(after - before, 0.0) / (high - low)
        return max(before + (size - low) * slope, 0.0)
