"""A language model beside the target, with one slot of keys and values per token it has read.

Slots have no order, so a drafted token that was accepted keeps its slot: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recserve.kernels.paged_kv import KVPool, KVShape, TreeBatch
from recserve.kernels.tree import TokenTree
from recserve.models.attention import PagedAttention
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class Chains:
    """Tokens to read: B chains, packed, each after what it stands on.

    tokens, slots [n]: the new tokens and where their keys and values go. lengths: of the chains.
    roots: for each chain the slots [L] of everything before it, in order.
    """

    tokens: Tensor
    slots: Tensor
    lengths: Seq[int]
    roots: tuple[Tensor, ...]

    def tree(self) -> TokenTree:
        """The chains as token trees."""
        device = self.tokens.device
        sizes = torch.tensor(self.lengths)
        stops = sizes.cumsum(0)
        offsets = torch.cat([stops.new_zeros(1), stops])
        index = torch.arange(self.tokens.shape[0])
        depths = index - offsets[:-1].repeat_interleave(sizes)
        parents = torch.where(depths > 0, index - 1, -1)
        columns = torch.stack([parents, depths, stops.repeat_interleave(sizes)]).to(device)
        return TokenTree(self.tokens, columns[0], columns[1], columns[2], offsets.to(device))


@dataclass(eq=False)
class Reading:
    """What the model has read of a sequence.

    slots [n]: of its first n tokens, on the device; kept: the same on the host. num_read: tokens
    whose keys and values are there. nodes: slots of the inner nodes of the last draft.
    """

    slots: Tensor
    host_slots: list[int] = field(default_factory=list)
    num_read: int = 0
    nodes: dict[int, int] = field(default_factory=dict)


class CachedModel:
    """num_slots: tokens of all sequences together. readings: by sequence."""

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
        """Slots that nobody holds."""
        return len(self._free)

    def place(self, name: int, length: int, inner: Seq[int], busy: Collection[int]) -> bool:
        """Take slots for all tokens of a sequence and for the inner nodes of a draft.

        length: its tokens. Where slots are short, sequences outside `busy` lose theirs; False where
        that does not suffice either.
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
        """Of the last draft's nodes, the accepted ones are tokens of the sequence from now on."""
        reading = self.readings.get(name)
        if reading is not None:
            path = [reading.nodes.pop(node) for node in accepted if node in reading.nodes]
            self._append(reading, path)
            reading.num_read += len(path)
            self._clear(reading)

    def forget(self, name: int) -> None:
        """Hand back a sequence's slots."""
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
            reading.slots = torch.cat([reading.slots, torch.tensor(slots, device=self.device)])

    def _shorten(self, reading: Reading, length: int) -> None:
        """The last token is always read anew: its hidden state is what a draft begins with."""
        if len(reading.host_slots) > length:
            self._free += reading.host_slots[length:]
            del reading.host_slots[length:]
            reading.slots = reading.slots[:length]
            reading.num_read = min(reading.num_read, length)

    def _clear(self, reading: Reading) -> None:
        self._free += reading.nodes.values()
        reading.nodes = {}

    def read_new(self, names: Seq[int], tokens: Seq[list[int]]) -> Tensor:
        """Read what sequences have more than was read. tokens: all of theirs, placed.

        Returns the final hidden states [B, E] of their last tokens.
        """
        readings = [self.readings[name] for name in names]
        new = [own[r.num_read :] for own, r in zip(tokens, readings, strict=True)]
        lengths = [len(part) for part in new]
        hidden = self.read(
            Chains(
                torch.tensor(sum(new, []), device=self.device),
                torch.cat([reading.slots[reading.num_read :] for reading in readings]),
                lengths,
                tuple(reading.slots[: reading.num_read] for reading in readings),
            )
        )
        for reading in readings:
            reading.num_read = len(reading.host_slots)
        return hidden[torch.tensor(lengths).cumsum(0).to(hidden.device) - 1]

    @torch.inference_mode()
    def read(self, chains: Chains) -> Tensor:
        """Final hidden states [n, E] of the new tokens; their keys and values are kept."""
        batch = TreeBatch(chains.tree(), None, chains.slots, chains.roots)
        attend = PagedAttention(batch, self.pool)
        hidden: Tensor = self.model(chains.tokens, batch.positions(), attend)
        return hidden
