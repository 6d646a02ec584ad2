"""Fixed rows on the device for the texts of captured steps: slots, token counts, last state."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.core.sequence import NO_SLOTS
from recserve.engine.text.sequence import TextSequence
from recserve.kernels.cache.kv_pool import KVPool

PAD_ROW = 0


@dataclass
class TextRow:
    """The row of one text.

    Attributes:
        number: Index of the row.
        last_hidden: [E] view of the text's row in TextRows.last_hidden.
        slots: The slots that were copied last.
    """

    number: int
    last_hidden: Tensor
    slots: Tensor = NO_SLOTS


class TextRows:
    """Device rows of all texts, at addresses that never change, so that a captured step finds
    them.

    Row PAD_ROW belongs to no text. All of its slots are the pool's spare slot, and its counts stay
    0.

    Attributes:
        slots: [R, W] int64 pool slots of the tokens of a text, in order.
        seen, written: [R, V] int32 counts as in TokenCounts, of texts with penalties.
        last_hidden: [R, E] final hidden state at the last accepted token of the latest replay.
    """

    def __init__(
        self, pool: KVPool, rows: int, width: int, vocab_size: int, states: Tensor
    ) -> None:
        """Allocates the rows.

        Args:
            pool: The key-value pool.
            rows: R, number of rows.
            width: W, most slots of a text.
            vocab_size: V.
            states: [*, E] tensor with the type, size and device of hidden states.
        """
        device = states.device
        self.slots = torch.full((rows, width), pool.spare_slot, device=device)
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.written = torch.zeros_like(self.seen)
        self.last_hidden = states.new_zeros(rows, states.shape[1])
        self._free = [row for row in range(rows) if row != PAD_ROW]
        self._rows: dict[TextSequence, TextRow] = {}

    def of(self, texts: Seq[TextSequence]) -> list[TextRow] | None:
        """Returns the up-to-date rows of some texts, or None if a text finds no free row."""
        found = []
        for text in texts:
            row = self._rows.get(text)
            # A text that gets pages gets a new tensor of slots.
            if row is None or row.slots is not text.slots:
                row = self._updated(text, row)
                if row is None:
                    return None
            found.append(row)
        return found

    def _updated(self, text: TextSequence, row: TextRow | None) -> TextRow | None:
        if row is None:
            if not self._free:
                return None
            number = self._free.pop()
            row = self._rows[text] = TextRow(number, self.last_hidden[number])
            if text.token_counts is not None:
                text.token_counts.move(self.seen[number], self.written[number])
        self.slots[row.number, : text.slots.shape[0]] = text.slots
        row.slots = text.slots
        return row

    def count(self, rows: Tensor, tokens: Tensor, which: Tensor) -> None:
        """Adds written tokens to the counts. It only launches kernels.

        Args:
            rows: [n] rows of the tokens. PAD_ROW counts nothing.
            tokens: [n, m] token ids.
            which: [n, m] bool, the tokens to count.
        """
        place = rows[:, None] * self.seen.shape[1] + tokens
        ones = (which & (rows[:, None] != PAD_ROW)).to(torch.int32)
        for counts in (self.seen, self.written):
            counts.view(-1).index_add_(0, place.flatten(), ones.flatten())

    def forget(self, text: TextSequence) -> None:
        """Frees the row of a text and gives the text its counts back."""
        row = self._rows.pop(text, None)
        if row is None:
            return
        self._free.append(row.number)
        counts = text.token_counts
        if counts is not None:
            counts.move(torch.empty_like(counts.seen), torch.empty_like(counts.written))
