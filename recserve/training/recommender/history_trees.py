"""Training data of a recommender: each user's history as one token tree.

One forward pass trains all positions of a history. In `items` form with history a b c, the trunk
holds the items. Below each position hang the first codes of the next item. The node of code l
predicts code l + 1, and the trunk node predicts code 0.

    BOS -+- a0 -- a1
         `- a -+- b0 -- b1
               `- b -+- c0 -- c1        (c itself is only a target)

A branch ends at the last code that the trie leaves open, since later codes have no loss. In `codes`
form the codes are the trunk, and the tree is a chain. A model of level heads alone has a trunk
without branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.kernels.trie.trie import Trie
from recserve.models.config import RecommenderConfig
from recserve.models.prefix_template import BOS

Ints = NDArray[np.int64]
BLOCK_TREES = 1 << 14  # whose sizes are computed at once


@dataclass(frozen=True)
class HistoryBatch:
    """B trees padded to N nodes, with the prediction targets of their nodes.

    Targets are grouped by level.

    Attributes:
        tokens: [B, N] token ids.
        positions: [B, N] positions.
        ends: [B, N] one past the last node of each subtree, relative to the tree. A padding node
            sees only itself.
        target_nodes: [m] node of each target, as an index into the flattened [B * N].
        target_rows: [m] item row of each target.
        target_levels: [m] level of that item that is predicted.
        target_steps: [m] number of earlier items in the history.
        trunk_nodes: [q] for each predicted item, the node whose state represents the history before
            it.
        trunk_rows: [q] item row of each predicted item.
        trunk_steps: [q] number of earlier items in the history.
        histories: [B, S] item rows in order, -1 where padded.
        target_weights: [m] weight of each target; None: 1 each.
        trunk_weights: [q] weight of each predicted item; None: 1 each.
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
    target_weights: Tensor | None = None
    trunk_weights: Tensor | None = None

    def to(self, device: torch.device | str) -> HistoryBatch:
        """Returns the batch on another device."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{n: part.to(device) for n, part in parts.items() if part is not None}
        )

    def mask(self) -> Tensor:
        """Returns the [B, 1, N, N] bool mask; row i sees column j where `j <= i < ends[j]`."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        below = index[None, :] <= index[:, None]
        return (below & (index[None, :, None] < self.ends[:, None, :]))[:, None]


class HistoryTrees:
    """All training histories as trees, cut into batches by tree number.

    The trees of a batch are laid out when it is drawn. Of all events there are only their items.
    """

    def __init__(
        self,
        offsets: Ints,
        item_rows: NDArray[np.int32],
        codes: NDArray[np.generic],
        trie: Trie,
        config: RecommenderConfig,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Lays out the trees.

        A history longer than `config.max_history_items` is cut into consecutive ones, so that each
        event is a target exactly once.

        Args:
            offsets: [U+1] start of each user's history in `item_rows`.
            item_rows: [n] item rows of all histories, oldest first.
            codes: [I, L] semantic ids of the items.
            trie: Trie of the semantic ids.
            config: Configuration of the recommender.
            weights: [n] weight of each event as a target; None: 1 each.

        Raises:
            ValueError: If there is no event.
        """
        if item_rows.shape[0] == 0:
            raise ValueError(
                "there is no event to train on; leave-one-out holds out the last two of each user"
            )
        self.step_starts = windows(offsets, config.max_history_items + 1)
        self.rows, self.weights = item_rows, weights
        self.open_levels = _open_levels(trie, config)
        levels = self.num_levels = config.num_levels
        self.first_item_token = config.num_code_tokens
        self.item_tokens = codes.astype(np.int64) + np.asarray(config.level_offsets)
        self.flat = config.input == "codes"
        # Nodes below the trunk node of a step, by item.
        depths = np.where(self.open_levels, np.arange(levels), 0).max(1)
        self.depths = np.full(len(depths), levels - 1) if self.flat else depths
        self.tree_sizes = np.empty(len(self.step_starts) - 1, np.int64)
        for first in range(0, len(self), BLOCK_TREES):
            starts = self.step_starts[first : first + BLOCK_TREES + 1]
            nodes = 1 + self.depths[self.rows[starts[0] : starts[-1]]]
            sums = np.add.reduceat(nodes, starts[:-1] - starts[0])
            self.tree_sizes[first : first + BLOCK_TREES] = sums

    def __len__(self) -> int:
        return len(self.step_starts) - 1

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all trees."""
        return int(self.tree_sizes.sum())

    def batch(self, trees: Ints) -> HistoryBatch:
        """Returns the trees with these numbers, padded to the largest of them."""
        sizes = self.tree_sizes[trees]
        width = int(sizes.max())
        column = np.arange(width)
        inside = column < sizes[:, None]
        first_steps = self.step_starts[trees]
        counts = self.step_starts[trees + 1] - first_steps
        steps = _ranges(first_steps, counts)
        tree = np.repeat(np.arange(trees.shape[0]), counts)
        rows = self.rows[steps].astype(np.int64)
        step_of = steps - first_steps[tree]
        trunk_nodes, nodes = self._nodes(tree, rows, step_of, np.cumsum(sizes) - sizes)
        tokens, positions, ends = (np.zeros(inside.shape, np.int64) for _ in range(3))
        tokens[:], positions[:], ends[:] = BOS, 0, column + 1
        for padded, values in zip((tokens, positions, ends), nodes, strict=True):
            padded[inside] = values
        trunk = tree * width + trunk_nodes
        level, which = np.nonzero(self.open_levels[rows].T)
        histories = np.full((trees.shape[0], int(counts.max())), -1, dtype=np.int64)
        histories[tree, step_of] = rows
        arrays = (
            tokens,
            positions,
            ends,
            trunk[which] + level,
            rows[which],
            level,
            step_of[which],
            trunk,
            rows,
            step_of,
            histories,
        )
        found = HistoryBatch(*(torch.from_numpy(array) for array in arrays))
        if self.weights is None:
            return found
        weights = torch.from_numpy(self.weights[steps])
        return replace(
            found, target_weights=weights[torch.from_numpy(which)], trunk_weights=weights
        )

    def _nodes(
        self, tree: Ints, rows: Ints, step_of: Ints, tree_starts: Ints
    ) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
        """Returns the nodes of some trees, one tree after another.

        Args:
            tree: [s] tree of each step.
            rows: [s] item row of each step.
            step_of: [s] number of each step in its tree.
            tree_starts: [t] first node of each tree.

        Returns:
            [s] trunk node of each step in its tree, and tokens, positions and ends [nodes].
        """
        levels, tokens = self.num_levels, self.item_tokens
        before = np.where(step_of > 0, np.roll(rows, 1), 0)  # the previous item of the history
        known = tokens[before, -1] if self.flat else self.first_item_token + before
        trunk = np.where(step_of > 0, known, BOS)
        # Step s owns the nodes node_starts[s] .. node_starts[s + 1] - 1: one trunk node, then its
        # branch. `inner` is a node's position in its step; 0 is the trunk node.
        sizes = 1 + self.depths[rows]
        node_starts = np.concatenate([[0], np.cumsum(sizes)])
        step = np.repeat(np.arange(rows.shape[0]), sizes)
        inner = np.arange(node_starts[-1]) - node_starts[step]
        starts = tree_starts[tree]
        whole = np.append(tree_starts[1:], node_starts[-1])[tree] - starts
        is_trunk = inner == 0
        item_tokens = tokens[rows[step], np.maximum(inner - 1, 0)]
        branch_ends = node_starts[1:] - starts
        ends = whole[step] if self.flat else np.where(is_trunk, whole[step], branch_ends[step])
        return node_starts[:-1] - starts, (
            np.where(is_trunk, trunk[step], item_tokens),
            step_of[step] * (levels if self.flat else 1) + inner,
            ends,
        )

    def epoch(self, seed: int, epoch: int, max_nodes: int) -> list[Ints]:
        """Returns the tree numbers of each batch.

        A batch holds trees of similar size and at most `max_nodes` padded nodes. The order depends
        only on (seed, epoch).
        """
        return bucket_sizes(self.tree_sizes, seed, epoch, max_nodes)


def bucket_sizes(sizes: Ints, seed: int, epoch: int, max_nodes: int) -> list[Ints]:
    """Returns the numbers of each batch, with similar sizes together.

    Args:
        sizes: [n] size of each element.
        seed: Seed of the order.
        epoch: Number of the epoch; the order depends only on (seed, epoch).
        max_nodes: Maximum padded size of a batch, which is its count times its largest size.
    """
    noise = np.random.default_rng((seed, epoch))
    order = np.argsort(sizes * noise.uniform(0.9, 1.1, sizes.shape[0]), kind="stable")
    return list(_shuffle(_cut(order, sizes, max_nodes), noise))


def windows(offsets: Ints, size: int) -> Ints:
    """Returns the offsets of histories after cutting them into pieces of at most `size` events.

    Args:
        offsets: [U+1] start of each history.
        size: Maximum number of events in a piece.
    """
    counts = np.diff(offsets)
    pieces = -(-counts // size)
    first = np.repeat(offsets[:-1], pieces)
    number = np.arange(first.shape[0]) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts: Ints = np.append(first + number * size, offsets[-1]).astype(np.int64)
    return starts


def _open_levels(trie: Trie, config: RecommenderConfig) -> NDArray[np.bool_]:
    """Returns [I, L] bool: True where a level of an item has a loss.

    With `children`, these are the levels whose prefix has several children. A model that is not
    autoregressive has none.
    """
    if not config.autoregressive:
        return np.zeros((trie.num_items, config.num_levels), dtype=np.bool_)
    if config.normalization == "vocabulary":
        return np.ones((trie.num_items, config.num_levels), dtype=np.bool_)
    nodes = trie.nodes_of_items(torch.arange(trie.num_items, device=trie.device)).long()
    parents = torch.cat([torch.zeros_like(nodes[:, :1]), nodes[:, :-1]], dim=1)
    open_levels: NDArray[np.bool_] = (trie.num_children(parents) > 1).cpu().numpy()
    return open_levels


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Returns the integers of all ranges `starts[i] .. starts[i] + counts[i] - 1`, concatenated."""
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


def _shuffle(batches: Iterator[Ints], noise: np.random.Generator) -> Iterator[Ints]:
    collected = list(batches)
    for index in noise.permutation(len(collected)):
        yield collected[index]
