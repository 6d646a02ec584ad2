"""What steps take: their nodes as they were measured at start, corrected by the steps themselves.

A step of n nodes takes `scale * cost(n)` in the network and `overhead` beside it. The scale falls
where steps are faster than was measured, as on a machine that was busy at start, so that nothing
else is ever negative; what they take longer is overhead, of its own for one, two, up to four,
up to eight … texts. What a step with drafts takes beyond that is a surcharge of its drafters, for
each text that drafted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from recserve.core.cost import Cost

MEMORY = 16  # steps that an average remembers


class StepTimes:
    """cost: of a step by its packed nodes."""

    def __init__(self, cost: Cost) -> None:
        self._sizes = np.array([0.0, *cost.sizes, 1e9])
        measured = [0.0, *(cost(size) for size in cost.sizes), cost(1e9)]
        self._milliseconds = np.maximum.accumulate(np.array(measured))
        self._scale = 1.0
        self._known: dict[int, float] = {}  # of the cost, asked for in every step
        self._overheads: dict[int, float] = {}
        self._surcharges: dict[tuple[str, int], float] = {}
        self._seen: dict[object, int] = {}

    def of_nodes(self, nodes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Milliseconds in the network."""
        return self._scale * np.interp(nodes, self._sizes, self._milliseconds)

    def overhead_ms(self, num_texts: int) -> float:
        """Beside the network, at least 0."""
        return self._overheads.get(num_texts.bit_length(), 0.0)

    def surcharge_ms(self, drafter: str, num_texts: int) -> float:
        """Of each text that drafts, in a step of so many texts, at least 0."""
        return self._surcharges.get((drafter, num_texts.bit_length()), 0.0)

    def stepped(
        self, num_texts: int, nodes: int, drafted: Mapping[str, int], milliseconds: float
    ) -> None:
        """What a step took from its forward to its end. drafted: texts with a draft by drafter."""
        bucket = num_texts.bit_length()
        if nodes not in self._known:
            self._known[nodes] = float(np.interp(nodes, self._sizes, self._milliseconds))
        network = self._scale * self._known[nodes]
        known = network + self.overhead_ms(num_texts)
        known += sum(n * self.surcharge_ms(name, num_texts) for name, n in drafted.items())
        # A step that took far longer was interrupted by something else.
        error = min(milliseconds, 2 * known) - known
        error *= self._share((*sorted(drafted), bucket))
        texts = sum(drafted.values())
        for name in drafted:
            before = self.surcharge_ms(name, num_texts)
            after = max(before + error / texts, 0.0)
            self._surcharges[name, bucket] = after
            error -= (after - before) * drafted[name]
            texts -= drafted[name]
        overhead = self.overhead_ms(num_texts) + error
        if overhead < 0:
            self._scale *= max(1 + overhead / network, 0.5)
        self._overheads[bucket] = max(overhead, 0.0)

    def _share(self, key: object) -> float:
        """Weight of a new value in its running average."""
        self._seen[key] = min(self._seen.get(key, 0) + 1, MEMORY)
        return 1 / self._seen[key]
