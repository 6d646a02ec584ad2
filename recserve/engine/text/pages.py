"""Pages of texts: allocation as texts grow, and use of the prefix cache."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from recserve.core.request import PrefixKeys
from recserve.engine.runtime.page_placement import PagePlacement
from recserve.engine.runtime.scheduler import RequestTooLarge
from recserve.engine.text.sequence import NO_SLOTS, TextSequence
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device

log = logging.getLogger(__name__)


class TextPages:
    """The pages of one language model's pool, and their assignment to texts.

    Attributes:
        pool: The key-value pool.
        size: Tokens per page.
        allocator: Free pages.
        cache: The prefix cache.
        pages_of: Returns the number of pages that hold a number of tokens.
        hidden_size: Numbers of a final hidden state.
    """

    def __init__(self, pool: KVPool, hidden_size: int) -> None:
        self.pool, self.size, self.hidden_size = pool, pool.page_size, hidden_size
        self._placement = PagePlacement(pool)
        self.allocator, self.cache = self._placement.allocator, self._placement.cache
        self.pages_of = self._placement.pages_of
        # [P, S] slots of every page, on the device, so that allocation uploads nothing.
        slots = torch.arange(pool.num_pages * pool.page_size, device=pool.keys.device)
        self._slots = slots.view(pool.num_pages, pool.page_size)

    def check(self, tokens: int) -> None:
        """Raises RequestTooLarge if the pool never holds so many tokens of one text."""
        pages = self.pages_of(tokens)
        if pages > self.allocator.num_pages:
            raise RequestTooLarge(
                f"prompt and max_tokens need {pages} pages of {self.size} tokens, the pool "
                f"has {self.allocator.num_pages}; request less or raise kv_bytes"
            )

    def place(self, sequence: TextSequence) -> bool:
        """Gives a text pages for all committed tokens, cached ones if possible. Returns False if
        none.
        """
        keys = np.array(sequence.context.tokens[:-1], dtype=np.int64)
        root = _root(sequence, keys)
        placed = self._placement.place(root, 1, separate=False)
        if placed is None:
            return False
        pages, found = placed
        sequence.pages, sequence.slots = [], on_device(NO_SLOTS, self.pool.keys.device)
        self._take(sequence, pages)
        self._restore(sequence, found.length, found.last_hidden)
        return True

    def _restore(self, sequence: TextSequence, length: int, state: Tensor | None) -> None:
        """Marks cached tokens as computed. The state ends with what the drafter reads, if any."""
        sequence.states, sequence.num_read = None, length
        if state is not None and sequence.drafter.reads_states:
            # The drafter's entries of the cached rows reach to the state before the last one.
            sequence.num_read = length - 1
            state, read = state[: self.hidden_size], state[self.hidden_size :]
            sequence.states = read[None]
        sequence.computed(length, state)

    def grow(self, sequence: TextSequence, tokens: int) -> bool:
        """Gives a text pages for this many tokens. Returns False if that needs a preemption."""
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
        sequence.context.slots = sequence.slots

    def release(self, sequence: TextSequence) -> None:
        """Releases the pages of a text. A text that is not finite leaves nothing in the prefix
        cache.
        """
        if sequence.flawed:
            log.error("the model's output for a text is not finite; its prefix is dropped")
            keys = np.array(sequence.context.tokens, dtype=np.int64)
            root = _root(sequence, keys)
            self.cache.discard(root, sequence.pages, self.pool)
        self.allocator.release(sequence.pages)
        sequence.pages, sequence.capacity = [], 0

    def cache_prefix(self, sequence: TextSequence) -> None:
        """Stores the computed tokens of a text in the prefix cache."""
        computed, state = sequence.num_computed, sequence.last_hidden
        if state is None or sequence.flawed:
            return
        if sequence.states is not None:
            state = torch.cat([state, sequence.states[-1]])
        keys = np.array(sequence.context.tokens[:computed], dtype=np.int64)
        pages = sequence.pages[: self.pages_of(computed)]
        self.cache.insert(_root(sequence, keys), pages, state.clone())


def _root(sequence: TextSequence, keys: np.ndarray) -> PrefixKeys:
    """Returns the keys of a text's tokens. A drafter with keys and values of its own is named."""
    request = sequence.request
    drafter = request.speculation.drafter if sequence.drafter.reads_states else ""
    return PrefixKeys(keys, drafter=drafter, salt=request.salt)
