"""Roots computed before anybody asks: the next request finds them in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from recserve.core.request import Prewarmed, Result
from recserve.core.sequence import Sequence
from recserve.core.strategy import Strategy


class PrewarmStrategy(Strategy):
    """Nothing hangs under the root: no tree, no round."""

    def start(self, sequences: Seq[Sequence]) -> tuple[Sequence, ...]:
        """The roots are computed, which is all."""
        return tuple(sequences)

    def finish(self, state: tuple[Sequence, ...]) -> list[Result]:
        """What it took."""
        return [Prewarmed(sequence.timing) for sequence in state]
