"""A row on the device for every text that steps in fixed shapes: its slots, token counts, state."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.engine.text.sequence import NO_SLOTS, TextSequence
from recserve.kernels.paged_kv import KVPool

PAD_ROW = 0


@dataclass
class TextRow:
    """Of one text. last_hidden [E]: its row of TextRows.last_hidden. slots: those copied last."""

    number: int
    last_hidden: Tensor
    slots: Tensor = NO_SLOTS


class TextRows:
    """slots [R, W] int64: pool slots of the tokens of a text, in order. seen, written [R, V] int32:
    as TokenCounts, of the texts that count. last_hidden [R, E]: the final hidden state that the
    last replay found at the last accepted token. Row PAD_ROW belongs to no text: all of its slots
    are the pool's spare one, and it counts nothing. Addresses never change, so that a
    recorded step finds them again.
    """

    def __init__(
        self, pool: KVPool, rows: int, width: int, vocab_size: int, states: Tensor
    ) -> None:
        """states [*, E]: of the type and size of hidden states, on the device."""
        device = states.device
        self.slots = torch.full((rows, width), pool.spare_slot, device=device)
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.written = torch.zeros_like(self.seen)
        self.last_hidden = states.new_zeros(rows, states.shape[1])
        self._free = [row for row in range(rows) if row != PAD_ROW]
        self._rows: dict[TextSequence, TextRow] = {}

    def of(self, texts: Seq[TextSequence]) -> list[TextRow] | None:
        """The rows of some texts, up to date; None if all are taken."""
        found = []
        for text in texts:
            row = self._rows.get(text)
            # Slots are a new tensor whenever pages were taken.
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
        """Add written tokens. rows [n] of the tokens [n, m]; those of `which` [n, m] count, of row
        PAD_ROW none do. Launches only.
        """
        place = rows[:, None] * self.seen.shape[1] + tokens
        ones = (which & (rows[:, None] != PAD_ROW)).to(torch.int32)
        for counts in (self.seen, self.written):
            counts.view(-1).index_add_(0, place.flatten(), ones.flatten())

    def forget(self, text: TextSequence) -> None:
        """Its row is another's from now on."""
        row = self._rows.pop(text, None)
        if row is None:
            return
        self._free.append(row.number)
        counts = text.token_counts
        if counts is not None:
            counts.move(torch.empty_like(counts.seen), torch.empty_like(counts.written))
