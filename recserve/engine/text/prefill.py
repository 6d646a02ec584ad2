"""Prefill: prompts are computed in chunks, and a shared beginning is computed once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from recserve.core.finite import all_finite
from recserve.engine.runtime.runner import BatchSlice
from recserve.engine.text.sequence import TextSequence
from recserve.engine.text.step_states import StepStates
from recserve.kernels.host import on_device
from recserve.kernels.tree import chain
from recserve.models.inputs import NodeInputs


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a prompt, computed in one step.

    Attributes:
        sequence: The text.
        size: Number of tokens.
    """

    sequence: TextSequence
    size: int

    def piece(self) -> BatchSlice:
        """Returns the chunk as a chain under the computed tokens.

        Only its last state is read, unless the drafter reads all of them.
        """
        slots, start = self.sequence.slots, self.sequence.num_computed
        stop = start + self.size
        tokens = on_device(self.sequence.context.tokens[start:stop], slots.device)
        return BatchSlice(
            tree=chain(tokens),
            inputs=NodeInputs(tokens),
            queries=None,
            slots=slots[start:stop],
            prefix_slots=(slots[:start],),
            num_states=None if self.sequence.drafter.reads_states else 1,
        )

    def done(self, states: StepStates) -> None:
        """Marks the chunk as computed. `states` end with those of its last token.

        On a CUDA device, a check for finite values would make the host wait. There the text's first
        logits show it.
        """
        last_hidden, drafter = states.final[-1], self.sequence.drafter
        if drafter.reads_states:
            self.sequence.states = states.read_by(drafter, slice(None))
        self.sequence.flawed = not last_hidden.is_cuda and not all_finite(last_hidden)
        self.sequence.computed(self.sequence.num_computed + self.size, last_hidden)


def chunks(texts: Iterable[TextSequence], most: int) -> list[Chunk]:
    """Returns the chunks of one step with at most `most` tokens, in the order of the texts."""
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
    """Returns whether another text will soon compute at least one page of this text's beginning.

    Waiting for it takes no more time than computing the page twice.
    """
    rows = text.context.tokens[:-1]
    return any(
        not other.ready
        and other.request.salt == text.request.salt
        and shared_rows(rows, other.context.tokens[:-1], page_size)
        >= other.num_computed + page_size
        for other in others
    )


def shared_rows(rows: Seq[int], other: Seq[int], page_size: int) -> int:
    """Returns how many rows at the beginning could come from the other text's pages.

    These are whole pages, and the last partial page if one of the texts ends in it.
    """
    size, shared = min(len(rows), len(other)), 0
    while shared < size:
        stop = min(shared + page_size, size)
        if rows[shared:stop] != other[shared:stop]:
            break
        shared = stop
    return shared
