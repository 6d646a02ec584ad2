"""The trees of a step, packed on the host: each text's last committed token with its draft
below.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.tree import AUXILIARY, CANDIDATE, TokenTree
from recserve.speculation.draft import TextDraft

TOKENS, PARENTS, DEPTHS, ENDS, KINDS = range(5)
MAX_CHAIN_SHAPES = 256  # cached shapes of chains


@dataclass(frozen=True)
class PackedTrees:
    """Trees of B texts, and the parts of them that are on the device already.

    Attributes:
        columns: [5, T] tokens, parents, depths, ends and kinds.
        offsets: [B + 1] first node of each tree.
        late: Columns of drafts made on the device, each with its row and its place in that row.
        num_real: Number of nodes without the padding.
        depth: Most levels below a node 0, without the padding.
        shaped: Whether depths and ends are known. If not, they follow from late parents.
    """

    columns: NDArray[np.int64]
    offsets: NDArray[np.int64]
    late: list[tuple[Tensor, int, slice]]
    num_real: int
    depth: int
    shaped: bool

    def complete(self, columns: Tensor) -> None:
        """Writes the late columns to the columns [5, T] on the device, in place."""
        for column, row, place in self.late:
            columns[row, place] = column
        if not self.shaped:
            own = columns[:, : self.num_real]
            own[DEPTHS], own[ENDS] = _shape(own[PARENTS], self.depth)


@dataclass(frozen=True)
class CapturedDrafts:
    """The last captured draft of every text, in memory that captured steps read.

    Attributes:
        columns: [4, R, N] tokens, parents, depths and ends of the drafts, by the text's row of the
            slot table. Places are those in the draft, and depths begin with 0.
    """

    columns: Tensor

    @staticmethod
    def allocate(num_rows: int, most_nodes: int, device: torch.device) -> CapturedDrafts:
        """Returns room for `num_rows` drafts of `most_nodes` nodes."""
        size = 4, num_rows, most_nodes
        return CapturedDrafts(torch.zeros(size, dtype=torch.int64, device=device))

    @property
    def most_nodes(self) -> int:
        """N, nodes of the largest draft."""
        return self.columns.shape[2]

    def write(
        self, rows: Tensor, tokens: Tensor, parents: Tensor, counts: Tensor, depth: int
    ) -> None:
        """Stores drafts of B texts. It only launches kernels.

        Args:
            rows: [B] rows of the texts.
            tokens: [B, n] tokens of each draft. n is at most N.
            parents: [B, n] parents of the nodes, as in `TextDraft`.
            counts: [B] number of nodes. Further ones have no meaning.
            depth: Most levels.
        """
        texts, size = tokens.shape
        first = torch.arange(0, texts * size, size, device=rows.device)[:, None]
        inner = torch.arange(size, device=rows.device) < counts[:, None]
        above = torch.where(inner & (parents >= 0), parents + first, -1)
        depths, ends = (column.view(texts, size) for column in _shape(above.flatten(), depth))
        columns = torch.stack([tokens, parents, depths, ends - first])
        self.columns[..., :size].index_copy_(1, rows, columns)

    def put(self, trees: Tensor, places: Tensor) -> Tensor:
        """Returns packed trees with the nodes of captured drafts. It only launches kernels.

        Args:
            trees: [5, T] columns as in `PackedTrees`.
            places: [T] as `draft_places` returns them.
        """
        at = places.clamp(min=0)
        first = torch.arange(len(places), device=places.device) - at % self.most_nodes
        shifts = torch.stack([torch.zeros_like(first), first, torch.ones_like(first), first])
        drafted = self.columns.flatten(1)[:, at] + shifts
        placed = torch.where(places >= 0, drafted, trees[:KINDS])
        return torch.cat([placed, trees[KINDS:]])


def draft_places(drafts: Seq[TextDraft], most_nodes: int, num_nodes: int) -> NDArray[np.int64]:
    """Returns [num_nodes] where each packed node lies in `CapturedDrafts`, whose rows have
    `most_nodes` nodes. -1 marks node 0 of each tree, padding, and nodes of other drafts.
    """
    places, first = np.full(num_nodes, -1, np.int64), 1
    for draft in drafts:
        size = draft.num_nodes
        if draft.row is not None:
            start = draft.row * most_nodes
            places[first : first + size] = np.arange(start, start + size)
        first += 1 + size
    return places


class TreePacker:
    """Packs trees of node 0, the last committed token, and the draft below it, on one device.

    All columns of chains except the tokens follow from their lengths and are cached.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device, self._on_cpu = device, torch.device(device).type == "cpu"
        self._chains: dict[tuple[int, ...], TokenTree] = {}

    def __call__(self, last: Seq[int], drafts: Seq[TextDraft]) -> TokenTree:
        """Returns B packed trees of `1 + n` nodes each. `last` holds the B last committed
        tokens.
        """
        if all(d.is_chain and d.kinds is None and d.tokens.is_cpu for d in drafts):
            return self._pack_chains(last, drafts)
        return self._pack(last, drafts)

    def _pack(self, last: Seq[int], drafts: Seq[TextDraft]) -> TokenTree:
        trees = pack_trees(last, drafts, tuple(map(len, drafts)))
        columns = on_device(trees.columns, self.device)
        trees.complete(columns)
        named = any(draft.kinds is not None for draft in drafts)
        return TokenTree(
            tokens=columns[TOKENS],
            parents=columns[PARENTS],
            depths=columns[DEPTHS],
            ends=columns[ENDS],
            offsets=on_device(trees.offsets.copy(), self.device),
            kinds=columns[KINDS] if named else None,
        )

    def _pack_chains(self, last: Seq[int], drafts: Seq[TextDraft]) -> TokenTree:
        tokens: list[int] = []
        for first, draft in zip(last, drafts, strict=True):
            tokens.append(first)
            if len(draft):
                tokens += draft.tokens.tolist()
        sizes = tuple(map(len, drafts))
        alike = self._chains.get(sizes)
        if alike is None:
            if len(self._chains) == MAX_CHAIN_SHAPES:
                self._chains.clear()
            alike = self._chains[sizes] = self._pack(last, drafts)
        column = torch.tensor(tokens) if self._on_cpu else on_device(tokens, self.device)
        return replace(alike, tokens=column, kinds=None)


def pack_trees(
    last: Seq[int],
    drafts: Seq[TextDraft],
    sizes: tuple[int, ...],
    num_nodes: int = 0,
    num_trees: int = 0,
    without_captured: bool = False,
) -> PackedTrees:
    """Packs trees on the host.

    Two texts that end with the tokens x and y, with drafts of two nodes and one node:

        x -+- a     y --- d     node     0  1  2  3  4
           +- b                 token    x  a  b  y  d
                                parent  -1  0  0 -1  3
                                ends     3  2  3  5  5

    Padding is auxiliary, so that no walk leaves its first node.

    Args:
        last: [B] last committed token of each text.
        drafts: Draft of each text.
        sizes: Nodes of each draft.
        num_nodes: Pads to this number of nodes, with a chain as the last tree. It must have
            room for all trees. 0 adds no padding.
        num_trees: Pads to this number of trees, with trees of one node. 0 adds no padding.
        without_captured: Whether `CapturedDrafts.put` enters the nodes of captured drafts. Here
            they form a chain.
    """
    # The columns of a chain follow from its length. Forks are entered below.
    chains = _chains(sizes, num_nodes, num_trees)
    columns = chains.columns.copy()
    columns[TOKENS][chains.first] = last
    if not any(sizes):
        return PackedTrees(
            columns=columns,
            offsets=chains.offsets,
            late=[],
            num_real=chains.num_real,
            depth=0,
            shaped=True,
        )
    some = [
        (number, draft)
        for number, draft in enumerate(drafts)
        if draft.num_nodes and not (without_captured and draft.row is not None)
    ]
    forks = [(number, d.parents) for number, d in some if not d.is_chain]
    kinds = [(number, d.kinds) for number, d in some if d.kinds is not None]
    late = _put(columns, TOKENS, [(number, d.tokens) for number, d in some], sizes) if some else []
    late += _put(columns, KINDS, kinds, sizes) if kinds else []
    late_forks = _put(columns, PARENTS, forks, sizes) if forks else []
    depth = max([draft.depth for draft in drafts], default=0)
    if forks and not late_forks:
        own = columns[:, : chains.num_real]
        own[DEPTHS : ENDS + 1] = _cached_shape(own[PARENTS].tobytes(), depth)
    return PackedTrees(
        columns=columns,
        offsets=chains.offsets,
        late=late + late_forks,
        num_real=chains.num_real,
        depth=depth,
        shaped=not late_forks,
    )


def _put(
    columns: NDArray[np.int64],
    row: int,
    parts: Seq[tuple[int, Tensor]],
    sizes: tuple[int, ...],
) -> list[tuple[Tensor, int, slice]]:
    """Writes one column of some drafts, given with their numbers. Parents are relative to the
    draft.

    Returns:
        The parts that are on the device.
    """
    here = [part for part in parts if part[1].is_cpu]
    if here:
        places = _places(sizes, tuple([number for number, _ in here]))
        columns_here = [column for _, column in here]
        values = (columns_here[0] if len(here) == 1 else torch.cat(columns_here)).numpy()
        columns[row, places.nodes] = values + places.starts if row == PARENTS else values
    late = []
    for number, column in parts if len(here) < len(parts) else ():
        if not column.is_cpu:
            start = 1 + number + sum(sizes[:number])
            moved = column + start if row == PARENTS else column
            late.append((moved, row, slice(start, start + sizes[number])))
    return late


def drawn_rows(drafts: Seq[TextDraft], num_nodes: int = 0) -> NDArray[np.int64]:
    """Returns [T] the row of each packed node's probabilities among those of all drafts, in
    order.

    Node 0 of each tree and nodes that were not drawn have -1. num_nodes is as for `pack_trees`.
    """
    sizes = tuple([draft.num_nodes for draft in drafts])
    return _drawn_rows(sizes, tuple([draft.probs is not None for draft in drafts]), num_nodes)


@lru_cache(maxsize=256)
def _drawn_rows(
    sizes: tuple[int, ...], drawn: tuple[bool, ...], num_nodes: int
) -> NDArray[np.int64]:
    rows = np.full(num_nodes or sum(sizes) + len(sizes), -1, np.int64)
    some = tuple([number for number, given in enumerate(drawn) if given])
    if some:
        nodes = _places(sizes, some).nodes
        rows[nodes] = np.arange(nodes.shape[0])
    return rows


@dataclass(frozen=True)
class _Places:
    """Packed nodes of some drafts.

    Attributes:
        nodes: [n] packed nodes.
        starts: [n] first node of each node's draft.
    """

    nodes: NDArray[np.int64]
    starts: NDArray[np.int64]


@lru_cache(maxsize=256)
def _places(sizes: tuple[int, ...], numbers: tuple[int, ...]) -> _Places:
    """Returns the nodes of the drafts `numbers`, given the nodes of each draft."""
    firsts = [1 + number + sum(sizes[:number]) for number in numbers]
    nodes = [np.arange(f, f + sizes[n]) for f, n in zip(firsts, numbers, strict=True)]
    return _Places(np.concatenate(nodes), np.repeat(firsts, [sizes[n] for n in numbers]))


@dataclass(frozen=True)
class _Chains:
    """Trees that are chains.

    Attributes:
        columns: [5, T] as in PackedTrees, with tokens 0.
        offsets: [B + 1] first node of each tree.
        first: Node 0 of the trees that are not padding.
        num_real: Number of nodes of these trees.
    """

    columns: NDArray[np.int64]
    offsets: NDArray[np.int64]
    first: NDArray[np.int64]
    num_real: int


@lru_cache(maxsize=256)
def _chains(drafts: tuple[int, ...], num_nodes: int, num_trees: int) -> _Chains:
    """Returns chains with `drafts` nodes below node 0, padded as by `pack_trees`."""
    sizes = np.ones(max(num_trees, len(drafts)), np.int64)
    sizes[: len(drafts)] += np.array(drafts, np.int64)
    if num_nodes:
        sizes[-1] = num_nodes - sizes[:-1].sum()
    offsets = np.zeros(sizes.shape[0] + 1, np.int64)
    stops = sizes.cumsum(out=offsets[1:])
    columns = np.zeros((5, int(stops[-1])), np.int64)
    index = np.arange(columns.shape[1])
    columns[DEPTHS] = index - offsets[:-1].repeat(sizes)
    columns[PARENTS] = np.where(columns[DEPTHS] > 0, index - 1, -1)
    columns[ENDS] = stops.repeat(sizes)
    stop = int(offsets[len(drafts)])
    columns[KINDS, :stop], columns[KINDS, stop:] = CANDIDATE, AUXILIARY
    return _Chains(columns, offsets, offsets[: len(drafts)], stop)


@lru_cache(maxsize=256)
def _cached_shape(parents: bytes, depth: int) -> NDArray[np.int64]:
    """Returns `_shape` as [2, T], cached.

    A drafter with a fixed tree has the same parents in every step, and computing depths and ends
    takes several operators per level. `parents` holds the bytes of [T] int64, because an array
    cannot be a key.
    """
    columns = _shape(torch.from_numpy(np.frombuffer(parents, np.int64).copy()), depth)
    return torch.stack(columns).numpy()


def _shape(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Returns depths and ends [T] of trees in preorder with at most `depth` levels below their
    roots.
    """
    node, depths, sizes = parents, torch.zeros_like(parents), torch.ones_like(parents)
    for _ in range(depth):  # `node` climbs to the ancestor of each node, one level per turn
        inside = node >= 0
        depths += inside
        sizes.index_add_(0, node.clamp(min=0), inside.to(sizes.dtype))
        node = torch.where(inside, parents[node.clamp(min=0)], -1)
    return depths, torch.arange(parents.shape[0], device=parents.device) + sizes
