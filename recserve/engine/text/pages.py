"""Pages of texts: taken as they grow, found in the prefix cache, and left to it."""

from __future__ import annotations

import logging

import numpy as np
import torch

from recserve.core.request import RootKeys
from recserve.engine.runtime.page_placement import PagePlacement
from recserve.engine.text.sequence import NO_SLOTS, TextSequence
from recserve.kernels.paged_kv import KVPool

log = logging.getLogger(__name__)


class TextPages:
    """The pool of one language model and who holds what of it."""

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.size = pool, pool.page_size
        self._placement = PagePlacement(pool)
        self.allocator, self.cache = self._placement.allocator, self._placement.cache
        self.pages_of = self._placement.pages_of
        # Of every page [P, S]: nothing is uploaded where a text takes one.
        slots = torch.arange(pool.num_pages * pool.page_size, device=pool.keys.device)
        self._slots = slots.view(pool.num_pages, pool.page_size)

    def place(self, sequence: TextSequence) -> bool:
        """Pages for all committed tokens, as many as possible from the prefix cache."""
        keys = np.array(sequence.context.tokens[:-1], dtype=np.int64)
        placed = self._placement.place(RootKeys(keys), 1, separate=False)
        if placed is None:
            return False
        sequence.pages, sequence.slots = [], NO_SLOTS.to(self.pool.keys.device)
        self._take(sequence, placed.pages)
        sequence.computed(placed.found.length, placed.found.last_hidden)
        return True

    def grow(self, sequence: TextSequence, tokens: int) -> bool:
        """Pages for so many tokens, if they are free without preempting a text."""
        if tokens <= sequence.capacity:
            return True
        missing = self.pages_of(tokens) - len(sequence.pages)
        self.cache.evict(missing)
        if self.allocator.num_free < missing:
            return False
        self._take(sequence, self.allocator.allocate(missing))
        return True

    def _take(self, sequence: TextSequence, pages: list[int]) -> None:
        sequence.pages = sequence.pages + pages
        sequence.slots = torch.cat([sequence.slots, *[self._slots[page] for page in pages]])
        sequence.capacity = len(sequence.pages) * self.size

    def release(self, sequence: TextSequence) -> None:
        """Give its pages back; of a text that is not finite nothing is found again."""
        if sequence.flawed:
            log.error("the model's output for a text is not finite; its prefix is dropped")
            root = RootKeys(np.array(sequence.context.tokens, dtype=np.int64))
            self.cache.discard(root, sequence.pages, self.pool)
        self.allocator.release(sequence.pages)
        sequence.pages, sequence.capacity = [], 0

    def cache_prefix(self, sequence: TextSequence) -> None:
        """Let others, and itself, find what the text has computed."""
        computed, state = sequence.num_computed, sequence.last_hidden
        if state is not None and not sequence.flawed:
            keys = np.array(sequence.context.tokens[:computed], dtype=np.int64)
            self.cache.insert(keys, 0, sequence.pages[: self.pages_of(computed)], state.clone())
