"""Requests that step together, and the removal of their states that are not finite.

On the CPU, `zero_nonfinite` finds states that are not finite after each forward pass. On a CUDA
device the flags of core/finite.py travel with the states until scores are read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recserve.core.finite import NotFinite, all_finite, nonfinite_flags, without_nonfinite
from recserve.core.request import Continuation, PromptScores, Result, Scores, Slate
from recserve.core.sequence import SearchSequence
from recserve.core.strategy import Draft, Strategy
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.tree_batch import Prefixes, TreeBatch


@dataclass
class Round:
    """A draft whose nodes are computed in one step or in several ones.

    Attributes:
        draft: What the strategy proposed.
        batch: Its trees with their slots.
        states: Hidden states of the nodes computed so far, in parts.
        num_computed: Number of these nodes.
        part: The trees, with the nodes that the current step computes.
    """

    draft: Draft
    batch: TreeBatch
    states: list[Tensor] = field(default_factory=list)
    num_computed: int = 0
    part: TreeBatch | None = None

    def take(self, most: int | None) -> int:
        """Takes at most `most` nodes into the current step, None all that are left, and returns how
        many.

        A node sees earlier nodes only, so it finds their keys and values in the pool.
        """
        self.part = self._next(most)
        return len(self.part.inputs)

    def _next(self, most: int | None) -> TreeBatch:
        batch, start = self.batch, self.num_computed
        count = stop = len(batch.inputs)
        if most is not None:
            stop = min(count, start + most)
        if stop - start == count:
            return batch
        counts = None
        if batch.counts is not None:
            ends = [min(max(end, start), stop) for end in accumulate(batch.counts, initial=0)]
            counts = [after - before for before, after in pairwise(ends)]
        nodes = batch.queries
        if nodes is None:
            nodes = torch.arange(len(batch.inputs), device=batch.slots.device)
        inputs = batch.inputs.select(slice(start, stop))
        return replace(batch, inputs=inputs, queries=nodes[start:stop], counts=counts)

    def add(self, states: Tensor) -> Tensor | None:
        """Adds the states of the nodes of the step. Returns all states after the last part."""
        self.states.append(states)
        self.num_computed += states.shape[0]
        if self.num_computed < len(self.batch.inputs):
            return None
        return states if len(self.states) == 1 else torch.cat(self.states)


@dataclass
class SearchBatch:
    """Requests of one strategy that started together and step together.

    Attributes:
        strategy: The strategy of all requests.
        sequences: The requests.
        state: The strategy's state of the search. None until a replay or a start gives it.
        round: The draft that is being computed. None between two rounds.
        prefixes: What the trees hang under. None before the first round.
    """

    strategy: Strategy
    sequences: list[SearchSequence]
    state: Any = None
    round: Round | None = None
    prefixes: Prefixes | None = None


def zero_nonfinite(
    sequences: Seq[SearchSequence], batch: TreeBatch, states: Tensor, pool: KVPool
) -> Tensor:
    """Replaces states that are not finite by zeros, and marks their sequences as nonfinite.

    The search goes on with the zeros because it compares sums of states, and NaN compares as false
    with everything.

    Args:
        sequences: The sequences of the batch's trees, in order.
        batch: The trees whose nodes were computed.
        states: [Tq, E] hidden states of these nodes.
        pool: The pool that holds their keys and values. Those of nonfinite nodes become zero.

    Returns:
        [Tq, E] finite states. On a CUDA device, the input itself.
    """
    if states.is_cuda or all_finite(states):
        return states
    nonfinite, owners, slots = nonfinite_flags(states), batch.tree.tree_ids(), batch.slots
    if batch.queries is not None:
        owners, slots = owners[batch.queries], slots[batch.queries]
    flags = torch.isnan(nonfinite)
    for owner in owners[flags].tolist():
        sequences[owner].nonfinite = True
    pool.clear_slots(slots[flags])
    return without_nonfinite(states, nonfinite)


def check_result(result: Result | Continuation | NotFinite) -> Result | Continuation | NotFinite:
    """Returns the result, or NotFinite if one of its scores is not finite.

    The scores are on the host already, so the check does not wait for a device.
    """
    scores = result.scores if isinstance(result, Slate) else None
    if isinstance(result, Scores):
        scores = result.values
    if isinstance(result, PromptScores):
        scores = result.chosen if result.mean is None else result.mean
    return result if scores is None or np.isfinite(scores).all() else NotFinite()


def computed_nodes(draft: Draft) -> list[int]:
    """Returns the number of computed nodes of each tree. It reads the device if there are
    several.
    """
    if draft.tree.num_trees == 1:
        return [len(draft.inputs)]
    offsets = draft.tree.offsets
    if draft.queries is not None:
        offsets = torch.searchsorted(draft.queries, offsets)
    return [stop - start for start, stop in pairwise(offsets.tolist())]
