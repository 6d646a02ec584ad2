"""What work costs on this machine: measured at some sizes, interpolated between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

RUNS = 4
BUDGET_S = 0.3


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


def measured(
    work: Callable[[int], None],
    sizes: tuple[int, ...],
    device: torch.device,
    budget_s: float = BUDGET_S,
) -> Cost:
    """The fastest of some runs at each size after one to warm up, sizes ascending; none that would
    spend more than the budget. On a CPU the thread's own time: what other processes take is no cost
    of the work.
    """
    cuda = device.type == "cuda"
    clock = time.perf_counter if cuda else time.thread_time

    def run_ms(size: int) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        began = clock()
        work(size)
        if cuda:
            torch.cuda.synchronize(device)
        return (clock() - began) * 1e3

    began = clock()
    work(sizes[0])
    found: list[float] = []
    for number, size in enumerate(sizes):
        if found:
            ahead_s = 1e-3 * RUNS * found[-1] * size / sizes[number - 1]
            if clock() - began + ahead_s > budget_s:
                break
        found.append(min(run_ms(size) for _ in range(RUNS)))
    return Cost(sizes[: len(found)], tuple(found))
