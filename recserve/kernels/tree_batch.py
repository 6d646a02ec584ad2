"""Trees of one forward pass, and the addresses of the keys that they read."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree, merge


class Prefixes:
    """The prefixes under B trees, as parts of a table of slots.

    Prefix b lies at `slots.view(-1)[starts[b] : starts[b] + lengths[b]]`. The rest of the table is
    not read. The host knows the places, except in a captured step. As a sequence, a `Prefixes` has
    the slots [R] of each prefix.

    Attributes:
        slots: [R, W] or [N] pool slots, contiguous.
        count: B.
        longest: Bound of the lengths.
        places: Starts and lengths on the host. None in a captured step.
    """

    def __init__(self, slots: Tensor, starts: Seq[int], lengths: Seq[int]) -> None:
        """Takes the first place and the number of tokens of each prefix."""
        self.slots, self.count, self.longest = slots, len(lengths), max(lengths)
        self.places: tuple[Seq[int], Seq[int]] | None = (starts, lengths)
        self._columns: tuple[Tensor, ...] | None = None

    @staticmethod
    def on_device(slots: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Prefixes:
        """Returns prefixes whose places [B], contiguous, only the device knows. None has more than
        `longest` tokens.
        """
        prefixes = Prefixes(slots, (), (longest,))
        prefixes.count, prefixes.places = starts.shape[0], None
        prefixes._columns = starts, lengths
        return prefixes

    @staticmethod
    def of(parts: Seq[Tensor]) -> Prefixes:
        """Returns prefixes with these slots, copied side by side."""
        lengths = [part.shape[0] for part in parts]
        starts = list(accumulate(lengths[:-1], initial=0))
        return Prefixes(
            parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts)), starts, lengths
        )

    @staticmethod
    def merge(parts: Seq[Prefixes]) -> Prefixes:
        """Returns the prefixes of all parts in order."""
        if any(part.slots is not parts[0].slots for part in parts):
            return Prefixes.of([slots for part in parts for slots in part])
        places = [part.on_host() for part in parts]
        starts = [start for own, _ in places for start in own]
        return Prefixes(parts[0].slots, starts, [length for _, own in places for length in own])

    @property
    def starts(self) -> Tensor:
        """[B] int64 first place of each prefix, on the device."""
        return self._device_places()[0]

    @property
    def lengths(self) -> Tensor:
        """[B] int64 tokens of each prefix, on the device."""
        return self._device_places()[1]

    def _device_places(self) -> tuple[Tensor, ...]:
        if self._columns is None:
            self._columns = on_device(self.on_host(), self.slots.device).unbind()
        return self._columns

    def slots_after(self, tree: TokenTree) -> Tensor:
        """Returns [T] the slot of each node of B trees whose node n lies n slots after the prefix.

        It reads nothing from the device.
        """
        slots = self.slots.view(-1)
        if self.count == 1 and self.places is not None:
            (start,), (length,) = self.places
            return slots[start + length : start + length + tree.num_nodes]
        first = self.starts + self.lengths - tree.offsets[:-1]
        nodes = torch.arange(tree.num_nodes, device=slots.device)
        return slots[first[tree.tree_ids()] + nodes]

    def on_host(self) -> tuple[Seq[int], Seq[int]]:
        """Returns `places`, which a captured step may not ask for."""
        assert self.places is not None, "only the device knows these prefixes"
        return self.places

    def after(self, count: int) -> Prefixes:
        """Returns the prefixes without their first `count` tokens."""
        if self.places is None:
            left, longest = (self.lengths - count).clamp(min=0), max(self.longest - count, 1)
            return Prefixes.on_device(self.slots, self.starts + count, left, longest)
        starts, lengths = self.places
        return Prefixes(
            self.slots, [s + count for s in starts], [max(n - count, 0) for n in lengths]
        )

    def last(self, count: int) -> Prefixes:
        """Returns the last `count` tokens of each prefix, or all tokens of a shorter one."""
        if self.places is None:
            least = self.lengths.clamp(max=count)
            places = self.starts + self.lengths - least
            return Prefixes.on_device(self.slots, places, least, min(self.longest, count))
        starts, lengths = self.places
        counts = [min(n, count) for n in lengths]
        firsts = [s + n - k for s, n, k in zip(starts, lengths, counts, strict=True)]
        return Prefixes(self.slots, firsts, counts)

    def reverse(self) -> Prefixes:
        """Returns a copy with the tokens of each prefix in reverse order."""
        size, device = max(self.longest, 1), self.slots.device
        places = (self.starts + self.lengths - 1)[:, None] - torch.arange(size, device=device)
        slots = self.slots.view(-1)[places.clamp(min=0)]
        if self.places is None:
            first = torch.arange(0, size * len(self), size, device=device)
            return Prefixes.on_device(slots, first, self.lengths, size)
        return Prefixes(slots, range(0, size * len(self), size), self.places[1])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        starts, lengths = self.on_host()
        return self.slots.view(-1)[starts[number] : starts[number] + lengths[number]]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True)
class TreeBatch:
    """Trees of one forward pass, and the slot of every key that they read.

    Attributes:
        tree: All nodes: those computed now and those computed in an earlier forward pass.
        queries: [Tq] nodes computed now, ascending. None means all nodes.
        slots: [T] pool slot of each node. The forward pass writes the nodes in `queries` and reads
            the others.
        prefixes: What the trees hang under.
        counts: [B] computed nodes of each tree. None means that the host does not know them.
        inputs: Model inputs of the computed nodes (models/inputs.py). Attention does not read them.
        num_states: Number of computed nodes, from the end, whose hidden states are read. The others
            only write keys and values. None reads all. Only prefills, which are chains, have it.
        fillers: Number of last trees that only fill the batch up to a fixed size. They have no
            prefix, and no result of theirs is read.
        fixed_shapes: Whether the host may not read the prefixes, and no shape may depend on their
            lengths: in a captured step.
    """

    tree: TokenTree
    queries: Tensor | None
    slots: Tensor
    prefixes: Prefixes
    counts: list[int] | None = None
    inputs: Any = None
    num_states: int | None = None
    fillers: int = 0
    fixed_shapes: bool = False

    @staticmethod
    def merge(parts: Seq[TreeBatch]) -> TreeBatch:
        """Returns batches as one, whose states are all read. They have no inputs afterwards."""
        if len(parts) == 1:
            return parts[0]
        queries, start = list[Tensor](), 0
        for part in parts:
            nodes = part.queries
            if nodes is None:
                nodes = torch.arange(part.tree.num_nodes, device=part.slots.device)
            queries.append(nodes + start)
            start += part.tree.num_nodes
        counts = [part.counts for part in parts if part.counts is not None]
        return TreeBatch(
            merge([part.tree for part in parts]),
            torch.cat(queries),
            torch.cat([part.slots for part in parts]),
            Prefixes.merge([part.prefixes for part in parts]),
            sum(counts, []) if len(counts) == len(parts) else None,
        )

    @property
    def num_queries(self) -> int:
        """Tq, the number of nodes computed now."""
        return self.tree.num_nodes if self.queries is None else self.queries.shape[0]

    def query_slots(self) -> Tensor:
        """Returns the slots [Tq] where the keys and values computed now are stored."""
        return self.slots if self.queries is None else self.slots[self.queries]

    def positions(self) -> Tensor:
        """Returns the absolute position [Tq] of each computed node: prefix length + depth."""
        depths = self.tree.depths if self.queries is None else self.tree.depths[self.queries]
        if self.prefixes.count == 1 and not self.fixed_shapes:
            return depths + self.prefixes.longest
        trees, lengths = self.tree.tree_ids(), self.prefixes.lengths
        return depths + lengths[trees if self.queries is None else trees[self.queries]]
