"""Drafters that read states, and where the rows of a captured draft's new states lie.

Texts have different numbers of new states, but a captured draft has room for the same number in
each. Rows after a text's own states are computed too, and written to the spare slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recserve.drafters.shared.noisy import DraftedTexts
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device
from recserve.kernels.tree import chains
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.speculation.drafter import Drafter, DraftInputs, TextContext

MAX_TEXTS = 64  # texts that are drafted together


class StateDrafter(Drafter):
    """A drafter of one network that reads states and drafts texts together.

    It knows how many tokens each text had when its last state was read.
    """

    needs_weights = True
    num_folders: ClassVar[int | None] = 1
    reads_states = True

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    @property
    def most_texts(self) -> int:
        """Texts that fit into the scratch memory."""
        return MAX_TEXTS

    def forget(self, context_id: int) -> None:
        """Drops the state of a text."""
        self._lengths.pop(context_id, None)

    def is_ready(self, context: TextContext) -> bool:
        """Whether the states of all committed tokens but the last are read."""
        return self._lengths.get(context.id) == len(context.tokens)

    def note_new(self, context: TextContext, first: int) -> bool:
        """Notes that the states from `first` on are read; says whether the one before them was."""
        known = self._lengths.get(context.id) == first + 1
        self._lengths[context.id] = len(context.tokens)
        return known


def capture_depths(depth: int) -> list[int]:
    """Returns the depths of level-by-level drafts that are captured, the deepest first.

    Powers of two below the deepest compute less than twice the levels that a draft needs.
    """
    return [depth, *(2**power for power in reversed(range((depth - 1).bit_length())))]


@dataclass(frozen=True)
class DraftStart:
    """What the trees of texts that are drafted together grow from.

    Attributes:
        drawn: How the texts draw.
        prefixes: Where the drafter's entries of each text lie.
        outputs: [B, O] the network's outputs at the last committed tokens.
        fixed_shapes: As in `TreeBatch`.
    """

    drawn: DraftedTexts
    prefixes: Prefixes
    outputs: Tensor
    fixed_shapes: bool = False

    @staticmethod
    def of(contexts: Seq[TextContext], prefixes: Prefixes, last: LastValues) -> DraftStart:
        """Returns the start of launched drafts, from the texts' last outputs."""
        table = prefixes.slots
        rows = on_device([context.row for context in contexts], table.device)
        drawn = DraftedTexts.of(contexts, table.device)
        return DraftStart(drawn, prefixes, last.of(table)[rows])


def entries_within(inputs: DraftInputs, stops: Tensor) -> Prefixes:
    """Returns where the entries of rows 0 to `stops` [B] lie, as `entries_before`."""
    width = inputs.table.shape[1]
    return Prefixes.on_device(inputs.table, inputs.rows * width + 1, stops, width - 1)


def new_rows(inputs: DraftInputs, pool: KVPool, before: Prefixes | None = None) -> TreeBatch:
    """Returns the rows of B texts for their new states, one chain of S rows for each text.

    `before` is what they hang under. None means the entries before them.
    """
    (texts, count), width = inputs.new_tokens.shape, inputs.table.shape[1]
    places = torch.arange(count, device=inputs.rows.device)
    own = places < inputs.new_counts[:, None]
    first = inputs.lengths - 1 - inputs.new_counts
    # The entry of a row lies in the slot of the next token.
    at = torch.where(own, (inputs.rows * width + first + 1)[:, None] + places, 0)
    slots = torch.where(own, inputs.table.view(-1)[at], pool.spare_slot).flatten()
    tree = chains(texts, count, slots.device)
    prefixes = entries_within(inputs, first) if before is None else before
    return TreeBatch(tree, None, slots, prefixes, [count] * texts, fixed_shapes=True)


def last_rows(inputs: DraftInputs) -> Tensor:
    """Returns [B] the row of each text's last new state; its first row where it has none."""
    (texts, count), device = inputs.new_tokens.shape, inputs.rows.device
    starts = torch.arange(0, texts * count, count, device=device)
    return starts + (inputs.new_counts - 1).clamp(min=0)


class LastValues:
    """One value for each row of the slot table: what the last read of a text left.

    Args:
        size: Shape of a value.
        dtype: Type of a value.
    """

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype) -> None:
        self._size, self._dtype = size, dtype
        self._values: Tensor | None = None

    def of(self, table: Tensor) -> Tensor:
        """Returns the values [R, *size] for a slot table [R, W], on its device."""
        values = self._values
        if values is None or len(values) != len(table) or values.device != table.device:
            shape = len(table), *self._size
            values = torch.zeros(shape, dtype=self._dtype, device=table.device)
            self._values = values
        return values

    def update(self, inputs: DraftInputs, new: Tensor) -> Tensor:
        """Stores the values [B, *size] of texts with new states; returns those of all B texts."""
        values = self.of(inputs.table)
        some = (inputs.new_counts > 0).view(-1, *[1] * len(self._size))
        latest = torch.where(some, new, values[inputs.rows])
        values.index_copy_(0, inputs.rows, latest)
        return latest
