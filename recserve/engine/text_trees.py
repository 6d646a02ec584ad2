"""The trees of a step: each text's last committed token and its draft below, packed on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.text import TextDraft
from recserve.kernels.host import on_device
from recserve.kernels.tree import CANDIDATE, TokenTree

TOKENS, PARENTS, DEPTHS, ENDS, KINDS = range(5)
KEPT = 256  # shapes of chains


@dataclass(frozen=True)
class PackedTrees:
    """Trees of B texts, and what of them is on the device already.

    columns [5, T]: tokens, parents, depths, ends, kinds. offsets [B + 1]. late: columns of drafts
    made on the device, each with its row and place. drafted: nodes but those that fill up, and
    depth: most levels below a node 0 among them. shaped: whether depths and ends are known; else
    they follow from the parents that come late.
    """

    columns: NDArray[np.int64]
    offsets: NDArray[np.int64]
    late: list[tuple[Tensor, int, slice]]
    drafted: int
    depth: int
    shaped: bool

    def complete(self, columns: Tensor) -> None:
        """Add what is late to the columns [5, T] on the device, in place."""
        for column, row, place in self.late:
            columns[row, place] = column
        if not self.shaped:
            own = columns[:, : self.drafted]
            own[DEPTHS], own[ENDS] = _shape(own[PARENTS], self.depth)


class TreePacker:
    """Trees of node 0, the last committed token, and the draft below it, on one device.

    What chains are beside their tokens follows from their lengths and is kept.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device, self._on_cpu = device, torch.device(device).type == "cpu"
        self._chains: dict[tuple[int, ...], TokenTree] = {}

    def __call__(self, last: Seq[int], drafts: Seq[TextDraft]) -> TokenTree:
        """last [B] tokens. Returns B trees of `1 + n` nodes each, packed."""
        if all(d.depth == len(d) and d.kinds is None and d.tokens.is_cpu for d in drafts):
            return self._of_chains(last, drafts)
        return self._packed(last, drafts)

    def _packed(self, last: Seq[int], drafts: Seq[TextDraft]) -> TokenTree:
        packed = pack_trees(last, drafts)
        columns = on_device(packed.columns, self.device)
        packed.complete(columns)
        named = any(draft.kinds is not None for draft in drafts)
        return TokenTree(
            columns[TOKENS],
            columns[PARENTS],
            columns[DEPTHS],
            columns[ENDS],
            on_device(packed.offsets, self.device),
            columns[KINDS] if named else None,
        )

    def _of_chains(self, last: Seq[int], drafts: Seq[TextDraft]) -> TokenTree:
        tokens: list[int] = []
        for first, draft in zip(last, drafts, strict=True):
            tokens.append(first)
            if len(draft):
                tokens += draft.tokens.tolist()
        sizes = tuple(map(len, drafts))
        alike = self._chains.get(sizes)
        if alike is None:
            if len(self._chains) == KEPT:
                self._chains.clear()
            alike = self._chains[sizes] = self._packed(last, drafts)
        placed = torch.tensor(tokens) if self._on_cpu else on_device(tokens, self.device)
        return TokenTree(placed, alike.parents, alike.depths, alike.ends, alike.offsets)


def pack_trees(
    last: Seq[int], drafts: Seq[TextDraft], num_nodes: int = 0, num_trees: int = 0
) -> PackedTrees:
    """num_nodes, num_trees: fill up to so many, with trees of one node and a last one, a chain, of
    what is left; there must be room for them. 0: as many as there are.
    """
    depth = max((draft.depth for draft in drafts), default=0)
    # All that a chain is follows from its length; what forks is told below.
    chains = _chains(tuple(map(len, drafts)), num_nodes, num_trees)
    columns, offsets = chains.columns.copy(), chains.offsets.copy()
    columns[TOKENS, offsets[: len(drafts)]] = last
    late: list[tuple[Tensor, int, slice]] = []
    forks = False
    for start, draft in zip(offsets.tolist(), drafts, strict=False):
        place = slice(start + 1, start + 1 + len(draft))
        told = [(draft.tokens, TOKENS, 0)] if len(draft) else []
        if draft.depth < len(draft):
            told.append((draft.parents, PARENTS, start + 1))
            forks = True
        if draft.kinds is not None:
            told.append((draft.kinds, KINDS, 0))
        for column, row, shift in told:
            if column.device.type == "cpu":
                columns[row, place] = column.numpy() + shift if shift else column.numpy()
            else:
                late.append((column + shift, row, place))
    drafted = int(offsets[len(drafts)])
    shaped = not any(row == PARENTS for _, row, _ in late)
    if forks and shaped:
        own = columns[:, :drafted]
        own[DEPTHS : ENDS + 1] = _known_shape(own[PARENTS].tobytes(), depth)
    return PackedTrees(columns, offsets, late, drafted, depth, shaped)


@dataclass(frozen=True)
class _Chains:
    """Columns [5, T] of trees that are chains, their tokens 0, and their offsets [B + 1]."""

    columns: NDArray[np.int64]
    offsets: NDArray[np.int64]


@lru_cache(maxsize=256)
def _chains(drafted: tuple[int, ...], num_nodes: int, num_trees: int) -> _Chains:
    """drafted: nodes below node 0 of each tree. num_nodes, num_trees: as for `pack_trees`."""
    sizes = np.ones(max(num_trees, len(drafted)), np.int64)
    sizes[: len(drafted)] += np.array(drafted, np.int64)
    if num_nodes:
        sizes[-1] = num_nodes - sizes[:-1].sum()
    offsets = np.zeros(sizes.shape[0] + 1, np.int64)
    stops = sizes.cumsum(out=offsets[1:])
    columns = np.zeros((5, int(stops[-1])), np.int64)
    index = np.arange(columns.shape[1])
    columns[DEPTHS] = index - offsets[:-1].repeat(sizes)
    columns[PARENTS] = np.where(columns[DEPTHS] > 0, index - 1, -1)
    columns[ENDS] = stops.repeat(sizes)
    columns[KINDS] = CANDIDATE
    return _Chains(columns, offsets)


@lru_cache(maxsize=256)
def _known_shape(parents: bytes, depth: int) -> NDArray[np.int64]:
    """[2, T] depths and ends. parents: the bytes of [T] int64; static trees have the same ones at
    every step.
    """
    columns = _shape(torch.from_numpy(np.frombuffer(parents, np.int64).copy()), depth)
    return torch.stack(columns).numpy()


def _shape(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Depths and ends [T] of trees in preorder, of at most `depth` levels below their roots."""
    node, depths, sizes = parents, torch.zeros_like(parents), torch.ones_like(parents)
    for _ in range(depth):
        inside = node >= 0
        depths += inside
        sizes.index_add_(0, node.clamp(min=0), inside.to(sizes.dtype))
        node = torch.where(inside, parents[node.clamp(min=0)], -1)
    return depths, torch.arange(parents.shape[0], device=parents.device) + sizes
