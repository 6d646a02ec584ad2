"""A row on the device for every text that steps in fixed shapes: its slots, its token counts."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.engine.text_sequence import TextSequence
from recserve.kernels.paged_kv import KVPool

NOBODY = 0


class TextRows:
    """slots [R, W] int64: pool slots of the tokens of a text, in order. seen, written [R, V] int32:
    as TokenCounts, of the texts that count. Row NOBODY belongs to no text: all of its slots are the
    pool's spare one. Addresses never change, so that a recorded step finds them again.
    """

    def __init__(self, pool: KVPool, rows: int, width: int, vocab_size: int) -> None:
        device = pool.keys.device
        self.slots = torch.full((rows, width), pool.spare_slot, device=device)
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.written = torch.zeros_like(self.seen)
        self._free = [row for row in range(rows) if row != NOBODY]
        self._rows: dict[int, int] = {}
        self._copied: dict[int, Tensor] = {}

    def row(self, text: TextSequence) -> int | None:
        """The row of a text, up to date; None if all are taken."""
        name = text.context.id
        if name not in self._rows:
            if not self._free:
                return None
            self._rows[name] = self._free.pop()
            counts = text.token_counts
            if counts is not None:
                row = self._rows[name]
                counts.move(self.seen[row], self.written[row])
        row = self._rows[name]
        # Slots are a new tensor whenever pages were taken.
        if self._copied.get(name) is not text.slots:
            self.slots[row, : text.slots.shape[0]] = text.slots
            self._copied[name] = text.slots
        return row

    def forget(self, text: TextSequence) -> None:
        """Its row is another's from now on."""
        name = text.context.id
        if name not in self._rows:
            return
        self._free.append(self._rows.pop(name))
        del self._copied[name]
        counts = text.token_counts
        if counts is not None:
            counts.move(torch.empty_like(counts.seen), torch.empty_like(counts.written))
