"""Trees that grow level by level along their likeliest nodes, for several texts at once.

A node has a key: its rank among its siblings, plus one, at each level of its path, as digits of a
number. Keys in ascending order are a depth-first preorder, and a subtree is a range of keys. So
sorting and searching keys gives packed trees without a loop over nodes or a copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.tree import TokenTree
from recserve.speculation.draft import Budget, TextDraft


@dataclass(frozen=True)
class NodeOrder:
    """The computed nodes of all texts in packed order.

    Attributes:
        texts: [n] text of each node.
        numbers: [n] number of each node among those of its text, in the order of computation.
    """

    texts: Tensor
    numbers: Tensor


class ScoreTree:
    """One growing tree per text.

    Attributes:
        num_texts: B.
        width: Children of a node, and nodes of a frontier.
        frontier_tokens: [B, width] tokens of the nodes that get children next, by ascending key.
    """

    def __init__(self, num_texts: int, width: int, depth: int, device: torch.device) -> None:
        """Starts with empty trees of at most `depth` levels."""
        self.num_texts, self.width, self._base = num_texts, width, width + 1
        self._depth, self._level = depth, 0
        self._span = self._base**depth
        nothing = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)
        self._frontier_keys, self._frontier_scores = nothing, nothing.float()
        self.frontier_tokens = nothing
        # Of all nodes, level by level: [B, n] each.
        self._keys: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        # Of all frontiers: [B, width] each.
        self._computed: list[tuple[Tensor, Tensor, Tensor]] = []

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Adds the children of the frontier; the likeliest of them are the next frontier.

        Args:
            tokens: [B, W, width] tokens of the children of each node of the frontier, best first.
            logprobs: [B, W, width] their log-probabilities given their parents.

        Returns:
            [B, width] place of each new frontier node's parent in the frontier before.
        """
        self._level += 1
        unit = self._base ** (self._depth - self._level)
        ranks = torch.arange(1, self.width + 1, device=tokens.device)
        above = self._frontier_keys[..., None].expand_as(tokens)
        keys = (above + ranks * unit).flatten(1)
        scores = (self._frontier_scores[..., None] + logprobs).flatten(1)
        self._keys.append(keys)
        self._parents.append(above.flatten(1))
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores)
        # Children are in ascending order of keys, so ascending places are as well.
        best = scores.topk(self.width, dim=1).indices.sort(dim=1).values
        before = self._frontier_keys
        self._frontier_keys, self._frontier_scores = keys.gather(1, best), scores.gather(1, best)
        self.frontier_tokens = tokens.flatten(1).gather(1, best)
        parents = best // self.width
        self._computed.append(
            (self._frontier_keys, before.gather(1, parents), self.frontier_tokens)
        )
        return parents

    def computed(self) -> tuple[TokenTree, NodeOrder, Tensor]:
        """Returns the packed trees of all frontiers, their order, and the nodes of the last one."""
        columns = [torch.cat(column, dim=1) for column in zip(*self._computed, strict=True)]
        keys, parents, tokens = columns
        device, (texts, count) = keys.device, keys.shape
        shift = torch.arange(texts, device=device)[:, None] * self._span
        ordered, order = (keys + shift).flatten().sort()
        owners, numbers = order // count, order % count
        levels = numbers // self.width
        units = self._base ** (self._depth - 1 - levels)
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
        queries = (levels == len(self._computed) - 1).nonzero()[:, 0]
        return tree, NodeOrder(owners, numbers), queries

    def best(self, budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns the likeliest nodes of each text within its budget, as a draft."""
        keys, parents = torch.cat(self._keys, dim=1), torch.cat(self._parents, dim=1)
        tokens, scores = torch.cat(self._tokens, dim=1), torch.cat(self._scores, dim=1)
        sizes = [level.shape[1] for level in self._keys]
        levels = torch.tensor([n for n, size in enumerate(sizes) for _ in range(size)])
        levels = levels.to(keys.device, non_blocking=True)
        depths = torch.tensor([budget.depth for budget in budgets]).to(keys.device)
        scores = scores.masked_fill(levels >= depths[:, None], float("-inf"))
        # A stable sort leaves a parent before a child of the same score.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        counts = [min(b.num_nodes, sum(sizes[: b.depth])) for b in budgets]
        drafts = []
        for text, count in enumerate(counts):
            own = order[text, :count]
            own = own[keys[text, own].argsort()]
            names = keys[text, own]
            above = torch.searchsorted(names, parents[text, own])
            depth = int(levels[own].max()) + 1
            drafts.append(
                TextDraft(tokens[text, own], torch.where(levels[own] > 0, above, -1), depth)
            )
        return drafts
