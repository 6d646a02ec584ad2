"""Roots computed before anybody asks: the next request finds them in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from recserve.core.drafting import Draft
from recserve.core.request import Result, Warmed, WarmRequest
from recserve.core.sequence import Sequence


class WarmStrategy:
    """Nothing hangs under the root: no tree, no round."""

    def tree_room(self, request: WarmRequest) -> int:
        """No nodes."""
        return 0

    def start(self, sequences: Seq[Sequence]) -> tuple[Sequence, ...]:
        """The roots are computed, which is all."""
        return tuple(sequences)

    def finished(self, state: tuple[Sequence, ...]) -> bool:
        """From the start."""
        return True

    def propose(self, state: tuple[Sequence, ...]) -> Draft:
        """Never called."""
        raise AssertionError("a warmed root has no tree")

    def verify(
        self, state: tuple[Sequence, ...], draft: Draft, slots: Tensor, hidden: Tensor
    ) -> tuple[Sequence, ...]:
        """Never called."""
        raise AssertionError("a warmed root has no tree")

    def finish(self, state: tuple[Sequence, ...]) -> list[Result]:
        """What it took."""
        return [Warmed(sequence.timing) for sequence in state]
