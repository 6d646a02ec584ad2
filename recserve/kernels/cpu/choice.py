"""Measures once which of two implementations is faster on this processor.

The C sources are written for wide vectors. torch can be faster on a processor without them. No list
of processors tells which is faster. So both do the same work once, for the served shapes and with
the serving threads. The faster one is used from then on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# torch replaces C only if it is clearly faster, so that noise does not change the choice between
# two starts.
MARGIN = 1.1
ROUNDS = 5
BUDGET_S = 0.05  # for one pair of calls; at least two rounds are timed


@dataclass(frozen=True)
class KernelChoice:
    """Times of C and of torch for the same work.

    Attributes:
        work: Description of the work, for the log.
        c_ms: Time in C for each size of the work.
        torch_ms: Time in torch for the same sizes.
    """

    work: str
    c_ms: tuple[float, ...]
    torch_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Geometric mean of C's times divided by torch's times."""
        pairs = zip(self.c_ms, self.torch_ms, strict=True)
        return math.exp(sum(math.log(c / t) for c, t in pairs) / len(self.c_ms))

    @property
    def in_c(self) -> bool:
        """Whether C does this work."""
        return self.ratio <= MARGIN

    @property
    def times(self) -> str:
        """Both times for the log, e.g. "C 0.12 / 1.9 ms, torch 0.2 / 2.1 ms"."""
        c, torch = (" / ".join(f"{t:.3g}" for t in ms) for ms in (self.c_ms, self.torch_ms))
        return f"C {c} ms, torch {torch} ms"

    def __str__(self) -> str:
        return f"{self.work}: {'C' if self.in_c else 'torch'} ({self.times})"


def measure(
    work: str, c: Sequence[Callable[[], object]], torch: Sequence[Callable[[], object]]
) -> KernelChoice:
    """Times each pair of calls alternately.

    Args:
        work: Description of what the calls compute.
        c: One call for each size of the work.
        torch: The same work in torch.
    """
    pairs = [_best_ms(one, other) for one, other in zip(c, torch, strict=True)]
    return KernelChoice(work, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def _best_ms(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Returns the shortest time of each call in ms; the first round only warms up."""
    best = [math.inf, math.inf]
    began = time.perf_counter()
    for number in range(ROUNDS + 1):
        for i, call in enumerate((one, other)):
            start = time.perf_counter()
            call()
            if number:
                best[i] = min(best[i], (time.perf_counter() - start) * 1e3)
        if number >= 2 and time.perf_counter() - began > BUDGET_S:
            break
    return best[0], best[1]
