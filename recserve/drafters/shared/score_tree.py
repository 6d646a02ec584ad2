"""Trees that grow level by level along their likeliest nodes, for several texts at once.

A node has a key: its rank among its siblings, plus one, at each level of its path, as digits of a
number. Keys in ascending order are a depth-first preorder, and a subtree is a range of keys. So
sorting and searching keys gives packed trees without a loop over nodes or a copy to the host. No
shape depends on values, so a captured draft grows trees in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from recserve.drafters.shared.rank_tree import RankTree
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree, chains
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.speculation.draft import Budget, TextDraft

MAX_KEY = 2**62  # largest number of a node


@dataclass(frozen=True)
class NodeOrder:
    """The computed nodes of all texts in packed order.

    Attributes:
        texts: [n] text of each node.
        numbers: [n] number of each node among those of its text, in the order of computation.
    """

    texts: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class BestNodes:
    """The likeliest nodes of each text in packed order.

    Attributes:
        tokens: [B, N] tokens. Those after a text's own number of nodes have no meaning.
        parents: [B, N] index of each node's parent in its draft, -1 on the first level.
        levels: [B, N] level of each node, from 0 on; -1 after a text's own nodes.
        numbers: [B, N] number of each node among all that were grown for its text, level by level.
    """

    tokens: Tensor
    parents: Tensor
    levels: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class _StaticShape:
    """A static tree in keys.

    Attributes:
        nodes: [n] keys of its nodes, ascending.
        inner: [m] keys of the nodes that have children, ascending. Never empty.
        sizes: Number of nodes within each depth, from 0 on.
    """

    nodes: Tensor
    inner: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(shape: RankTree, base: int, depth: int, device: torch.device) -> _StaticShape:
        paths = [path for path in shape.paths if len(path) <= depth]
        keys = {
            path: sum((rank + 1) * base ** (depth - 1 - level) for level, rank in enumerate(path))
            for path in paths
        }
        inner = sorted({keys[path[:-1]] for path in paths if len(path) > 1}) or [MAX_KEY]
        sizes = [sum(len(path) <= level for path in paths) for level in range(depth + 1)]
        columns = (torch.tensor(own, dtype=torch.int64) for own in (sorted(keys.values()), inner))
        nodes, parents = (own.to(device, non_blocking=True) for own in columns)
        return _StaticShape(nodes, parents, tuple(sizes))


class ScoreTree:
    """One growing tree per text.

    Attributes:
        num_texts: B.
        width: Most children of a node.
        depth: Most levels.
        num_parents: W, most nodes of a frontier.
        frontier_tokens: [B, W] tokens of the nodes that get children next, by ascending key.
    """

    def __init__(
        self,
        num_texts: int,
        width: int,
        depth: int,
        device: torch.device,
        shape: RankTree | None = None,
        num_parents: int | None = None,
    ) -> None:
        """Starts with empty trees of at most `depth` levels.

        Args:
            num_texts: B.
            width: Most children of a node.
            depth: Most levels.
            device: Device of the trees.
            shape: The static tree that all texts grow. None grows the likeliest nodes.
            num_parents: Most nodes of a frontier without a shape. None means `width`.
        """
        self.num_texts, self.width, self._base = num_texts, width, width + 1
        self.num_parents = num_parents or width if shape is None else shape.num_parents
        self._shape = None if shape is None else _StaticShape.of(shape, self._base, depth, device)
        self.depth, self._level = depth, 0
        self._span = self._base**depth
        nothing = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)
        self._frontier_keys, self._frontier_scores = nothing, nothing.float()
        self.frontier_tokens = nothing
        # Of all nodes, level by level: [B, n] each.
        self._keys: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._levels: list[Tensor] = []  # [n] each
        # Of all frontiers: [B, W] each, and their levels: [W] each.
        self._computed: list[tuple[Tensor, Tensor, Tensor]] = []
        self._computed_levels: list[Tensor] = []

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Adds the children of the frontier; the likeliest of them are the next frontier.

        Args:
            tokens: [B, W, k] tokens of the children of each node of the frontier, best first. The
                first frontier is the root, and W is 1. k is `width`, or less.
            logprobs: [B, W, k] their log-probabilities given their parents. A static tree ignores
                them.

        Returns:
            [B, W] place of each new frontier node's parent in the frontier before.
        """
        self._levels.append(torch.full((tokens[0].numel(),), self._level, device=tokens.device))
        self._level += 1
        unit = self._base ** (self.depth - self._level)
        count = tokens.shape[-1]
        ranks = torch.arange(1, count + 1, device=tokens.device)
        above = self._frontier_keys[..., None].expand_as(tokens)
        keys = (above + ranks * unit).flatten(1)
        if self._shape is not None:
            logprobs = (1.0 - 2.0 * ranks).expand_as(logprobs)  # the order of RankTree.within
        scores = (self._frontier_scores[..., None] + logprobs).flatten(1)
        ranked = scores
        if self._shape is not None:
            scores = scores.masked_fill(~_holds(self._shape.nodes, keys), float("-inf"))
            ranked = scores.masked_fill(~_holds(self._shape.inner, keys), float("-inf"))
        self._keys.append(keys)
        self._parents.append(above.flatten(1))
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores)
        # Children are in ascending order of keys, so ascending places are as well.
        best = ranked.topk(min(self.num_parents, scores.shape[1]), dim=1).indices.sort(dim=1).values
        before = self._frontier_keys
        self._frontier_keys, self._frontier_scores = keys.gather(1, best), scores.gather(1, best)
        self.frontier_tokens = tokens.flatten(1).gather(1, best)
        self._computed_levels.append(self._levels[-1][: best.shape[1]])
        parents = best // count
        self._computed.append(
            (self._frontier_keys, before.gather(1, parents), self.frontier_tokens)
        )
        return parents

    def frontier(self, prefixes: Prefixes, first: int, fixed_shapes: bool) -> TreeBatch:
        """Returns the batch that computes the frontier below all nodes computed before.

        Args:
            prefixes: What each tree hangs under.
            first: First slot of the scratch memory, which has `num_parents * depth` slots for each
                text.
            fixed_shapes: As in `TreeBatch`.
        """
        room = self.num_parents * self.depth
        if self.width == 1:  # one node of each level
            texts, size, device = self.num_texts, self._level, self.frontier_tokens.device
            nodes = chains(texts, size, device)
            starts = torch.arange(0, texts * room, room, device=device) + first
            slots = (starts[:, None] + torch.arange(size, device=device)).flatten()
            queries = torch.arange(size - 1, texts * size, size, device=device)
        else:
            nodes, order, queries = self._pack_frontiers()
            slots = first + order.numbers + order.texts * room
        counts = [self.frontier_tokens.shape[1]] * self.num_texts
        return TreeBatch(nodes, queries, slots, prefixes, counts, fixed_shapes=fixed_shapes)

    def _pack_frontiers(self) -> tuple[TokenTree, NodeOrder, Tensor]:
        """Returns the packed trees of all frontiers, their order, and the nodes of the last one."""
        columns = [torch.cat(column, dim=1) for column in zip(*self._computed, strict=True)]
        keys, parents, tokens = columns
        device, (texts, count) = keys.device, keys.shape
        shift = torch.arange(texts, device=device)[:, None] * self._span
        ordered, order = (keys + shift).flatten().sort()
        owners, numbers = order // count, order % count
        levels = torch.cat(self._computed_levels)[numbers]
        units = self._base ** (self.depth - 1 - levels)
        ends = torch.searchsorted(ordered, ordered + units)
        above = (parents + shift).flatten()[order]
        places = torch.searchsorted(ordered, above)
        tree = TokenTree(
            tokens=tokens.flatten()[order],
            parents=torch.where(levels > 0, places, -1),
            depths=levels,
            ends=ends,
            offsets=torch.arange(0, texts * count + 1, count, device=device),
        )
        queries = torch.searchsorted(ordered, (self._frontier_keys + shift).flatten())
        return tree, NodeOrder(owners, numbers), queries

    def sizes(self, budgets: Seq[Budget]) -> list[int]:
        """Returns the number of nodes of each text's draft within its budget."""
        if self._shape is None:
            within = [0, *accumulate(level.shape[1] for level in self._keys)]
        else:
            within = list(self._shape.sizes)
        return [min(b.num_nodes, within[min(b.depth, len(within) - 1)]) for b in budgets]

    def best(self, depths: Tensor, counts: Tensor, most: int) -> BestNodes:
        """Returns the likeliest nodes of each text.

        Args:
            depths: [B] most levels.
            counts: [B] number of nodes; there are as many within these levels.
            most: N, largest number of nodes.
        """
        keys, parents = torch.cat(self._keys, dim=1), torch.cat(self._parents, dim=1)
        tokens, scores = torch.cat(self._tokens, dim=1), torch.cat(self._scores, dim=1)
        levels = torch.cat(self._levels)
        scores = scores.masked_fill(levels >= depths[:, None], float("-inf"))
        # A stable sort leaves a parent before a child of the same score.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
        left_out = torch.arange(order.shape[1], device=keys.device) >= counts[:, None]
        names, places = keys.gather(1, order).masked_fill(left_out, MAX_KEY).sort(dim=1)
        own = order.gather(1, places)
        above = torch.searchsorted(names, parents.gather(1, own))
        # Nodes that are left out lie behind the others.
        own_levels = levels[own].masked_fill(left_out, -1)
        parents_in_draft = torch.where(own_levels > 0, above, -1)
        return BestNodes(tokens.gather(1, own), parents_in_draft, own_levels, own)

    def drafts(self, budgets: Seq[Budget], probs: Tensor | None = None) -> list[TextDraft]:
        """Returns the likeliest nodes of each text within its budget, as a draft.

        `probs` [B, n, V] are the distributions of all nodes, level by level. None: none was drawn.
        """
        device, counts = self._keys[0].device, self.sizes(budgets)
        limits = on_device([[b.depth for b in budgets], counts], device)
        nodes = self.best(limits[0], limits[1], max(counts))
        if device.type == "cpu":  # reading is free
            depths, may_fork = (nodes.levels.amax(1) + 1).tolist(), False
        else:
            depths = [min(b.depth, n) for b, n in zip(budgets, counts, strict=True)]
            may_fork = self.width > 1
        drafts = [
            TextDraft(tokens[:count], parents[:count], depth, may_fork=may_fork)
            for tokens, parents, depth, count in zip(
                nodes.tokens.unbind(), nodes.parents.unbind(), depths, counts, strict=True
            )
        ]
        if probs is None:
            return drafts
        rows = zip(drafts, probs, nodes.numbers, strict=True)
        return [replace(draft, probs=own[numbers[: len(draft)]]) for draft, own, numbers in rows]


def tree_sizes(width: int, depth: int) -> list[int]:
    """Returns the number of nodes within each depth, from 0 on, of trees without a shape."""
    return [0, *accumulate([width, *[width * width] * (depth - 1)])] if depth else [0]


def _holds(keys: Tensor, some: Tensor) -> Tensor:
    """Returns which of some keys of any shape are among the ascending keys [n]."""
    places = torch.searchsorted(keys, some).clamp(max=keys.shape[0] - 1)
    return keys[places] == some
