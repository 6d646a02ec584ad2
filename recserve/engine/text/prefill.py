"""Prompts on their way into the cache: in chunks, and what several begin with only once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.core.finite import all_finite
from recserve.engine.runtime.runner import ForwardPiece
from recserve.engine.text.sequence import TextSequence
from recserve.kernels.tree import chain
from recserve.models.inputs import NodeInputs


@dataclass(frozen=True)
class Chunk:
    """The next `size` missing tokens of a text, computed in one step."""

    sequence: TextSequence
    size: int

    def piece(self) -> ForwardPiece:
        """A chain after what is computed; only its last state is read."""
        slots, start = self.sequence.slots, self.sequence.num_computed
        stop = start + self.size
        tokens = torch.tensor(self.sequence.context.tokens[start:stop], device=slots.device)
        return ForwardPiece(
            tree=chain(tokens),
            inputs=NodeInputs(tokens),
            queries=None,
            slots=slots[start:stop],
            root_slots=(slots[:start],),
            num_states=1,
        )

    def done(self, last_hidden: Tensor) -> None:
        """Its keys and values are there. last_hidden [E]: its last state.

        On a device nobody waits to know whether that is finite: the text's first logits tell.
        """
        self.sequence.flawed = not last_hidden.is_cuda and not all_finite(last_hidden)
        self.sequence.computed(self.sequence.num_computed + self.size, last_hidden)


def chunks(texts: Iterable[TextSequence], most: int) -> list[Chunk]:
    """Who computes how many tokens in a step, first come first served."""
    left, found = most, []
    for text in texts:
        if text.ready:
            continue
        size = min(text.missing, left)
        if size:
            found.append(Chunk(text, size))
            left -= size
    return found


def computed_by_another(text: TextSequence, others: Iterable[TextSequence], page_size: int) -> bool:
    """Whether one of the others is about to compute at least a page of what this one begins with:
    waiting for it costs no more time than computing it twice.
    """
    rows = text.context.tokens[:-1]
    return any(
        not other.ready
        and shared_rows(rows, other.context.tokens[:-1], page_size)
        >= other.num_computed + page_size
        for other in others
    )


def shared_rows(rows: Seq[int], other: Seq[int], page_size: int) -> int:
    """How many rows at their beginning could come from the other's pages: whole pages, and the rest
    where one of the two ends in it.
    """
    size, shared = min(len(rows), len(other)), 0
    while shared < size:
        stop = min(shared + page_size, size)
        if rows[shared:stop] != other[shared:stop]:
            break
        shared = stop
    return shared
