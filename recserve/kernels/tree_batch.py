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


@dataclass(frozen=True)
class Prefixes:
    """The prefixes under B trees, as parts of a table of slots.

    Prefix b lies at `slots.view(-1)[starts[b] : starts[b] + lengths[b]]`. The rest of the table is
    not read. As a sequence, it has the slots [R] of each prefix; that reads the device.

    Attributes:
        slots: [R, W] or [N] pool slots, contiguous.
        starts: [B] int64 first place of each prefix.
        lengths: [B] int64 tokens of each prefix.
        longest: Bound of the lengths that the host knows.
    """

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int

    @staticmethod
    def in_table(slots: Tensor, starts: Seq[int], lengths: Seq[int]) -> Prefixes:
        """Returns prefixes at these places of a table, with one upload."""
        both = on_device([starts, lengths], slots.device)
        return Prefixes(slots, both[0], both[1], max(lengths))

    @staticmethod
    def of(parts: Seq[Tensor]) -> Prefixes:
        """Returns prefixes with these slots, copied side by side."""
        lengths = [part.shape[0] for part in parts]
        starts = list(accumulate(lengths[:-1], initial=0))
        slots = parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))
        return Prefixes.in_table(slots, starts, lengths)

    @staticmethod
    def merged(parts: Seq[Prefixes]) -> Prefixes:
        """Returns the prefixes of all parts in order."""
        if any(part.slots is not parts[0].slots for part in parts):
            return Prefixes.of([slots for part in parts for slots in part])
        starts = torch.cat([part.starts for part in parts])
        lengths = torch.cat([part.lengths for part in parts])
        return Prefixes(parts[0].slots, starts, lengths, max(part.longest for part in parts))

    def after(self, count: int) -> Prefixes:
        """Returns the prefixes without their first `count` tokens."""
        lengths = (self.lengths - count).clamp(min=0)
        return Prefixes(self.slots, self.starts + count, lengths, max(self.longest - count, 0))

    def last(self, count: int) -> Prefixes:
        """Returns the last `count` tokens of each prefix, or all tokens of a shorter one."""
        lengths = self.lengths.clamp(max=count)
        starts = self.starts + self.lengths - lengths
        return Prefixes(self.slots, starts, lengths, min(self.longest, count))

    def reversed(self) -> Prefixes:
        """Returns a copy with the tokens of each prefix in reverse order."""
        size = max(self.longest, 1)
        places = self.starts + self.lengths - 1
        places = (places[:, None] - torch.arange(size, device=places.device)).clamp(min=0)
        starts = torch.arange(len(self), device=places.device) * size
        return Prefixes(self.slots.view(-1)[places], starts, self.lengths, self.longest)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __getitem__(self, number: int) -> Tensor:
        start, length = int(self.starts[number]), int(self.lengths[number])
        return self.slots.view(-1)[start : start + length]

    def __iter__(self) -> Iterator[Tensor]:
        flat = self.slots.view(-1)
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield flat[start : start + length]


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
    def merged(parts: Seq[TreeBatch]) -> TreeBatch:
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
            Prefixes.merged([part.prefixes for part in parts]),
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
        lengths = self.prefixes.lengths
        if lengths.shape[0] == 1:
            return depths + lengths
        trees = self.tree.tree_ids()
        return depths + lengths[trees if self.queries is None else trees[self.queries]]
