"""Training data of a recommender: every user's history as one token tree, so that one pass trains
all of it.

`items` form, history a b c: the trunk carries the items, and under each position hang the first
codes of the item that came next; the node of code l predicts code l + 1, the trunk node predicts
code 0.

    BOS -+- a0 -- a1
         `- a -+- b0 -- b1
               `- b -+- c0 -- c1        (c itself is only a target)

A branch stops at the last code that the trie leaves open, since later codes cost nothing. In
`codes` form the codes are the trunk, and the tree is a chain. A model of level heads alone has
a trunk without branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.kernels.trie.trie import Trie
from recserve.models.recommender import BOS, RecommenderConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class HistoryBatch:
    """B trees padded to N nodes, and what is to be predicted at which node.

    tokens, positions, ends [B, N]: ends relative to the tree; a padding node sees only itself.
    target_nodes [m]: index into the flattened [B * N]; target_rows, target_levels, target_steps
    [m]: the item row, the level of it that is predicted and the number of items before it in the
    history; grouped by level. trunk_nodes, trunk_rows, trunk_steps [q]: the same, once per
    predicted item, at the node whose state stands for the history before it. histories [B, S]: item
    rows in order, -1 where padded.
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    target_nodes: Tensor
    target_rows: Tensor
    target_levels: Tensor
    target_steps: Tensor
    trunk_nodes: Tensor
    trunk_rows: Tensor
    trunk_steps: Tensor
    histories: Tensor

    def to(self, device: torch.device | str) -> HistoryBatch:
        """The same batch on another device."""
        return HistoryBatch(*(getattr(self, f.name).to(device) for f in fields(self)))

    def mask(self) -> Tensor:
        """[B, 1, N, N] bool, row sees column: `j <= i < ends[j]`."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        below = index[None, :] <= index[:, None]
        return (below & (index[None, :, None] < self.ends[:, None, :]))[:, None]


class HistoryTrees:
    """All training histories as trees, flat in memory; batches are cut from it by tree number."""

    def __init__(
        self,
        offsets: Ints,
        item_rows: NDArray[np.int32],
        codes: NDArray[np.generic],
        trie: Trie,
        config: RecommenderConfig,
    ) -> None:
        """Lay out the trees.

        offsets [U+1], item_rows [n]: histories in CSR form, oldest first. codes [I, L].
        A history longer than config.max_history_items is cut into consecutive ones, so that each
        event is a target exactly once. Raises ValueError if there is no event.
        """
        if item_rows.shape[0] == 0:
            raise ValueError(
                "there is no event to train on; leave-one-out keeps the last two apart"
            )
        starts = windows(offsets, config.max_history_items + 1)
        rows = item_rows.astype(np.int64)
        step_of = np.arange(rows.shape[0]) - np.repeat(starts[:-1], np.diff(starts))
        levels = config.num_levels
        tokens = codes.astype(np.int64) + np.asarray(config.level_offsets)
        open_levels = _open_levels(trie, config)
        before = np.where(step_of > 0, np.roll(rows, 1), 0)
        flat = config.input == "codes"
        if flat:
            branch = np.full(rows.shape[0], levels - 1)
            trunk = np.where(step_of > 0, tokens[before, -1], BOS)
        else:
            depths = np.where(open_levels, np.arange(levels), 0).max(1)
            branch = depths[rows]
            trunk = np.where(step_of > 0, config.num_code_tokens + before, BOS)
        node_starts = np.concatenate([[0], np.cumsum(1 + branch)])
        step = np.repeat(np.arange(rows.shape[0]), 1 + branch)
        inner = np.arange(node_starts[-1]) - node_starts[step]
        tree_starts = node_starts[starts]
        tree_of_step = np.repeat(np.arange(starts.shape[0] - 1), np.diff(starts))
        tree_sizes = np.diff(tree_starts)
        branch_ends = node_starts[step + 1] - tree_starts[tree_of_step[step]]
        is_trunk = inner == 0
        self.tokens = np.where(is_trunk, trunk[step], tokens[rows[step], np.maximum(inner - 1, 0)])
        self.positions = step_of[step] * (levels if flat else 1) + inner
        whole = tree_sizes[tree_of_step[step]]
        self.ends = whole if flat else np.where(is_trunk, whole, branch_ends)
        self.tree_starts = tree_starts
        self.step_starts = starts
        self.rows = rows
        self.step_of = step_of
        self.trunk_nodes = node_starts[:-1] - tree_starts[tree_of_step]
        self.open_levels = open_levels

    def __len__(self) -> int:
        return len(self.tree_starts) - 1

    @property
    def num_events(self) -> int:
        """Predicted items of one epoch."""
        return len(self.rows)

    def batch(self, trees: Ints) -> HistoryBatch:
        """The trees of these numbers, padded to the largest of them."""
        sizes = np.diff(self.tree_starts)[trees]
        width = int(sizes.max())
        column = np.arange(width)
        inside = column < sizes[:, None]
        source = np.where(inside, self.tree_starts[trees][:, None] + column, 0)
        counts = np.diff(self.step_starts)[trees]
        steps = _ranges(self.step_starts[trees], counts)
        tree = np.repeat(np.arange(trees.shape[0]), counts)
        rows = self.rows[steps]
        trunk = tree * width + self.trunk_nodes[steps]
        level, which = np.nonzero(self.open_levels[rows].T)
        histories = np.full((trees.shape[0], int(counts.max())), -1, dtype=np.int64)
        histories[tree, self.step_of[steps]] = rows
        arrays = (
            np.where(inside, self.tokens[source], BOS),
            np.where(inside, self.positions[source], 0),
            np.where(inside, self.ends[source], column + 1),
            trunk[which] + level,
            rows[which],
            level,
            self.step_of[steps][which],
            trunk,
            rows,
            self.step_of[steps],
            histories,
        )
        return HistoryBatch(*(torch.from_numpy(array) for array in arrays))

    def epoch(self, seed: int, epoch: int, max_nodes: int) -> list[Ints]:
        """Tree numbers of each batch: trees of like size together, at most max_nodes padded nodes
        in a batch.

        The order depends on (seed, epoch) and nothing else.
        """
        return bucketed(np.diff(self.tree_starts), seed, epoch, max_nodes)


def bucketed(sizes: Ints, seed: int, epoch: int, max_nodes: int) -> list[Ints]:
    """Numbers of each batch: like sizes together, at most max_nodes of padded size in a batch.

    The order depends on (seed, epoch) and nothing else.
    """
    noise = np.random.default_rng((seed, epoch))
    order = np.argsort(sizes * noise.uniform(0.9, 1.1, sizes.shape[0]), kind="stable")
    return list(_shuffled(_cut(order, sizes, max_nodes), noise))


def windows(offsets: Ints, size: int) -> Ints:
    """Offsets of histories cut into pieces of at most `size` events. offsets: [U+1]."""
    counts = np.diff(offsets)
    pieces = -(-counts // size)
    first = np.repeat(offsets[:-1], pieces)
    number = np.arange(first.shape[0]) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts: Ints = np.append(first + number * size, offsets[-1]).astype(np.int64)
    return starts


def _open_levels(trie: Trie, config: RecommenderConfig) -> NDArray[np.bool_]:
    """[I, L] whether a level of an item costs anything: with `children`, where the prefix has
    several; nowhere for a model that does not write one code after another."""
    if not config.autoregressive:
        return np.zeros((trie.num_items, config.num_levels), dtype=np.bool_)
    if config.normalization == "vocabulary":
        return np.ones((trie.num_items, config.num_levels), dtype=np.bool_)
    nodes = trie.nodes_of_items(torch.arange(trie.num_items, device=trie.device)).long()
    parents = torch.cat([torch.zeros_like(nodes[:, :1]), nodes[:, :-1]], dim=1)
    open_levels: NDArray[np.bool_] = (trie.num_children(parents) > 1).cpu().numpy()
    return open_levels


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """starts[0] .. starts[0] + counts[0] - 1, starts[1] .. and so on."""
    shift = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    ranges: Ints = shift + np.arange(shift.shape[0])
    return ranges


def _cut(order: Ints, sizes: Ints, max_nodes: int) -> Iterator[Ints]:
    first, widest = 0, 0
    for index, size in enumerate(sizes[order].tolist()):
        widest = max(widest, size)
        if index > first and widest * (index + 1 - first) > max_nodes:
            yield order[first:index]
            first, widest = index, size
    yield order[first:]


def _shuffled(batches: Iterator[Ints], noise: np.random.Generator) -> Iterator[Ints]:
    kept = list(batches)
    for index in noise.permutation(len(kept)):
        yield kept[index]
