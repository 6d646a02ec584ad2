"""A small language model with its own KV cache, which holds one slot per token.

Slots have no order, so an accepted draft token keeps its slot. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.attention import PagedAttention
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class Chains:
    """B packed chains of new tokens to compute, each with its prefix.

    Attributes:
        tokens: [n] int64 new tokens.
        slots: [n] int64 slots for their keys and values.
        lengths: Number of new tokens in each chain.
        prefixes: What the chains hang under.
    """

    tokens: Tensor
    slots: Tensor
    lengths: Seq[int]
    prefixes: Prefixes

    def tree(self) -> TokenTree:
        """Returns the chains as token trees."""
        device = self.tokens.device
        sizes = torch.tensor(self.lengths)
        stops = sizes.cumsum(0)
        offsets = torch.cat([stops.new_zeros(1), stops])
        # The parent of a chain's token is the token before it; `stops` is one past the chain's end.
        index = torch.arange(self.tokens.shape[0])
        depths = index - offsets[:-1].repeat_interleave(sizes)
        parents = torch.where(depths > 0, index - 1, -1)
        ends = stops.repeat_interleave(sizes)
        columns = on_device(torch.stack([parents, depths, ends]), device)
        return TokenTree(
            self.tokens, columns[0], columns[1], columns[2], on_device(offsets, device)
        )


@dataclass(eq=False)
class Reading:
    """Cache state of one sequence.

    Attributes:
        slots: [n] slots of its first n tokens, on the device.
        host_slots: The same slots on the host.
        num_read: Number of tokens whose keys and values are computed.
        nodes: Slots of the last draft's inner nodes, by node number.
    """

    slots: Tensor
    host_slots: list[int] = field(default_factory=list)
    num_read: int = 0
    nodes: dict[int, int] = field(default_factory=dict)


class CachedModel:
    """A draft model and its KV cache, which all sequences share.

    Args:
        model: The draft model.
        num_slots: Capacity of the cache, in tokens of all sequences together.

    Attributes:
        readings: Cache state by sequence id.
    """

    def __init__(self, model: LanguageModel, num_slots: int) -> None:
        decoder, weight = model.config.decoder, model.tokens.weight
        shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.model = model
        self.device = weight.device
        self.pool = KVPool(shape, num_slots, 1, weight.dtype, weight.device)
        self.readings: dict[int, Reading] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def place(self, name: int, length: int, inner: Seq[int], busy: Collection[int]) -> bool:
        """Reserves slots for all tokens of a sequence and for the inner nodes of a draft.

        If free slots are short, sequences outside `busy` lose theirs.

        Args:
            name: Sequence id.
            length: Number of tokens of the sequence.
            inner: Numbers of the draft's inner nodes.
            busy: Ids of sequences that must not lose their slots.

        Returns:
            False if the slots do not suffice.
        """
        reading = self.readings.get(name)
        if reading is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            reading = self.readings[name] = Reading(nothing)
        self._clear(reading)
        self._shorten(reading, length - 1)
        needed = length - len(reading.host_slots) + len(inner)
        if needed > len(self._free):
            for idle in sorted(self.readings.keys() - set(busy)):
                self.forget(idle)
        if needed > len(self._free):
            return False
        reading.nodes = dict(zip(inner, self._take(len(inner)), strict=True))
        self._append(reading, self._take(length - len(reading.host_slots)))
        return True

    def commit(self, name: int, accepted: Seq[int]) -> None:
        """Turns the accepted nodes of the last draft into tokens of the sequence."""
        reading = self.readings.get(name)
        if reading is not None:
            path = [reading.nodes.pop(node) for node in accepted if node in reading.nodes]
            self._append(reading, path)
            reading.num_read += len(path)
            self._clear(reading)

    def forget(self, name: int) -> None:
        """Frees a sequence's slots."""
        reading = self.readings.pop(name, None)
        if reading is not None:
            self._clear(reading)
            self._free += reading.host_slots

    def _take(self, count: int) -> list[int]:
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def _append(self, reading: Reading, slots: list[int]) -> None:
        if slots:
            reading.host_slots += slots
            reading.slots = torch.cat([reading.slots, on_device(slots, self.device)])

    def _shorten(self, reading: Reading, length: int) -> None:
        """Frees the slots after the first `length` tokens.

        Callers pass at most the number of tokens minus one. The last token is computed again in
        every step, because a draft starts from its hidden state.
        """
        if len(reading.host_slots) > length:
            self._free += reading.host_slots[length:]
            del reading.host_slots[length:]
            reading.slots = reading.slots[:length]
            reading.num_read = min(reading.num_read, length)

    def _clear(self, reading: Reading) -> None:
        self._free += reading.nodes.values()
        reading.nodes = {}

    def read_new(self, names: Seq[int], tokens: Seq[list[int]]) -> Tensor:
        """Computes the tokens of sequences that have no keys and values yet.

        Args:
            names: Ids of B sequences.
            tokens: All tokens of each sequence; their slots are reserved.

        Returns:
            [B, E] final hidden states of the last tokens.
        """
        readings = [self.readings[name] for name in names]
        new = [own[r.num_read :] for own, r in zip(tokens, readings, strict=True)]
        lengths = [len(part) for part in new]
        hidden = self.read(
            Chains(
                on_device(sum(new, []), self.device),
                torch.cat([reading.slots[reading.num_read :] for reading in readings]),
                lengths,
                Prefixes.of([reading.slots[: reading.num_read] for reading in readings]),
            )
        )
        for reading in readings:
            reading.num_read = len(reading.host_slots)
        return hidden[on_device(lengths, hidden.device).cumsum(0) - 1]

    @torch.inference_mode()
    def read(self, chains: Chains) -> Tensor:
        """Computes new tokens and stores their keys and values.

        Returns:
            [n, E] final hidden states of the new tokens.
        """
        batch = TreeBatch(chains.tree(), None, chains.slots, chains.prefixes)
        attend = PagedAttention(batch, self.pool)
        hidden: Tensor = self.model(chains.tokens, batch.positions(), attend)
        return hidden
