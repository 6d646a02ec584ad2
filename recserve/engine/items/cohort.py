"""Requests that step together, and their results that are not finite.

On the CPU, states that are not finite are removed here. On a CUDA device the flags of
core/finite.py travel with the states until scores are read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recserve.core.finite import NotFinite, all_finite, flaws_of, without_flaws
from recserve.core.request import Result, Scores, Slate
from recserve.core.sequence import Sequence
from recserve.core.strategy import Strategy, TreeStrategy
from recserve.engine.runtime.runner import ForwardPiece
from recserve.kernels.paged_kv import KVPool


@dataclass
class Cohort:
    """Requests that started together and step together."""

    strategy: Strategy
    sequences: list[Sequence]
    state: Any

    @property
    def finished(self) -> bool:
        """Whether nothing is left to score; without trees that is so from the start."""
        strategy = self.strategy
        return not isinstance(strategy, TreeStrategy) or strategy.finished(self.state)

    @property
    def tree_strategy(self) -> TreeStrategy:
        """The strategy of a cohort that is not finished."""
        assert isinstance(self.strategy, TreeStrategy)
        return self.strategy


def isolate(sequences: Seq[Sequence], piece: ForwardPiece, states: Tensor, pool: KVPool) -> Tensor:
    """Returns the states that a step goes on with, and marks the sequences with flawed ones.

    Args:
        sequences: Those of the piece's trees, in order.
        piece: The nodes that were computed.
        states: [Tq, E] of these nodes.
        pool: Holds their keys and values; flawed ones become zero.

    Returns:
        [Tq, E], zeros in place of what is not finite: searches compare sums of these, and NaN
        compares as false with everything.
    """
    if states.is_cuda or all_finite(states):
        return states
    flaws, owners, slots = flaws_of(states), piece.tree.tree_ids(), piece.slots
    if piece.queries is not None:
        owners, slots = owners[piece.queries], slots[piece.queries]
    flawed = torch.isnan(flaws)
    for owner in owners[flawed].tolist():
        sequences[owner].flawed = True
    pool.clear_slots(slots[flawed])
    return without_flaws(states, flaws)


def checked(result: Result | NotFinite) -> Result | NotFinite:
    """Returns the result, or NotFinite if one of its scores is not; the host has them already."""
    scores = result.scores if isinstance(result, Slate) else None
    if isinstance(result, Scores):
        scores = result.values
    return result if scores is None or np.isfinite(scores).all() else NotFinite()
