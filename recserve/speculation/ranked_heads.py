"""Draft heads that a recorded step can end with: all they read is there when its walk has ended.

They stand on the target's final hidden state at the last accepted token. So the step that finds the
state ranks the next draft's tokens too, in fixed shapes, and the drafter only builds its tree.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from recserve.speculation.text import Drafter


class RankedHeads(Protocol):
    """K heads, each of which ranks tokens of one position; num_ranks W: best ones that are kept."""

    @property
    def num_heads(self) -> int:
        """K."""
        ...

    @property
    def num_ranks(self) -> int:
        """W."""
        ...

    def ranked(
        self, hidden: Tensor, lengths: Tensor, temperatures: Tensor, seeds: Tensor, width: int
    ) -> Tensor:
        """[K, B, width] tokens, best first; row k for position `lengths + k`.

        hidden [B, E] at the last computed token; lengths [B] committed tokens; temperatures [B]
        float32, 0: no noise; seeds [B]. Launches only: nothing is asked of the device, and no shape
        depends on what the tensors hold.
        """
        ...


@runtime_checkable
class HasRankedHeads(Protocol):
    """A drafter that takes what its heads ranked from `TextContext.ranked`, where it is there."""

    def ranked_heads(self) -> RankedHeads | None:
        """None where it has none after all."""
        ...


def ranked_heads_of(drafter: Drafter) -> RankedHeads | None:
    """What a recorded step may end with for texts of this drafter."""
    return drafter.ranked_heads() if isinstance(drafter, HasRankedHeads) else None
