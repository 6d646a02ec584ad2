"""Search over a graph of similar items: finds good items while scoring only few of them.

From its seeds, a request moves `steps` times to the neighbours of the best items scored so far.
Many requests move together in tensors of fixed shape. An item costs one table look-up per level.
Source: RPG (KDD 2025, section 3.3); seeds are given here instead of drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.trie.item_scores import NOTHING, keys_of, rows_of, score_rows


@dataclass(frozen=True)
class ItemGraph:
    """Similar items of the first I items of a catalogue.

    Attributes:
        neighbours: [I, edges] int32 item rows, padded with -1.
        entries: [S] int32 item rows spread over the whole catalogue, where every search begins.
    """

    neighbours: Tensor
    entries: Tensor

    @property
    def num_items(self) -> int:
        """I, the number of items in the graph."""
        return self.neighbours.shape[0]

    def to(self, device: torch.device | str) -> ItemGraph:
        """Returns the same graph on another device."""
        return ItemGraph(self.neighbours.to(device), self.entries.to(device))


@dataclass(frozen=True)
class GraphWalk:
    """How far a search walks.

    Attributes:
        k: Items to return for each request.
        width: Items that are followed in the last step. Each step before it follows half as many as
            the next one.
        steps: Steps to neighbours.
    """

    k: int
    width: int
    steps: int


@dataclass(frozen=True)
class GraphResult:
    """Result of a search of the item graph.

    Attributes:
        best: [B, k] rank keys of the best usable items, best first, padded with NOTHING.
        num_scored: [B] items scored.
    """

    best: Tensor
    num_scored: Tensor


def search(
    graph: ItemGraph,
    log_probs: Tensor,
    item_tokens: Tensor,
    seeds: Tensor,
    usable: Tensor | None,
    walk: GraphWalk,
) -> GraphResult:
    """Returns the best usable items that the search reaches.

    Args:
        graph: Similar items of the first I items.
        log_probs: [B, V] of each token at its own level.
        item_tokens: [I', L], I' >= I. Items outside the graph are seeds of every request.
        seeds: [B, s] item rows, padded with -1. The graph's entries are added.
        usable: [B, I'] bool, or None for all. Items that are not usable are walked through but
            never returned.
        walk: How far to go.
    """
    k, width, steps = walk.k, walk.width, walk.steps
    batch, device = log_probs.shape[0], log_probs.device
    unknown = torch.arange(graph.num_items, item_tokens.shape[0], device=device)
    common = torch.cat([graph.entries.long(), unknown]).expand(batch, -1)
    rows = torch.cat([seeds, common], dim=1)
    scored = torch.zeros(batch, item_tokens.shape[0] + 1, dtype=torch.bool, device=device)
    followed = torch.full((batch, 0), NOTHING, device=device)
    best = torch.full((batch, k), NOTHING, device=device)
    for step in range(steps + 1):
        rows, fresh = _fresh(rows, scored)
        keys = _score(log_probs, item_tokens, rows, fresh)
        followed = _top(torch.cat([followed, keys], dim=1), width)
        if usable is not None:
            keys = keys.masked_fill(~usable.gather(1, rows), NOTHING)
        best = _top(torch.cat([best, keys], dim=1), k)
        if step < steps:
            # Each step follows twice as many items as the one before, because more is known by
            # then.
            leading = followed[:, : max(width >> (steps - 1 - step), 1)]
            known = rows_of(leading)
            linked = (leading != NOTHING) & (known < graph.num_items)
            near = graph.neighbours[torch.where(linked, known, 0)].long()
            rows = torch.where(linked[..., None], near, -1).flatten(1)
    return GraphResult(best, scored[:, :-1].sum(1))


def _fresh(rows: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts rows and finds those that are neither repeats nor already scored.

    Args:
        rows: [B, n], padded with -1.
        scored: [B, I + 1] bool, set to true for all rows. Its last column stands for no item.

    Returns:
        The rows in ascending order [B, n], and whether each is new [B, n].
    """
    items = scored.shape[1] - 1
    rows = torch.where(rows < 0, items, rows).sort(dim=1).values
    fresh = rows < items
    fresh[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    fresh &= ~scored.gather(1, rows)
    scored.scatter_(1, rows, True)
    return rows.clamp_(max=items - 1), fresh


def _score(log_probs: Tensor, item_tokens: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
    """Returns rank keys [B, n], NOTHING where a row is not fresh."""
    # on other devices, counting the fresh items would synchronise with the host
    if rows.device.type == "cpu":
        owners, columns = fresh.nonzero(as_tuple=True)
        chosen = rows[owners, columns]
        keys = torch.full(rows.shape, NOTHING)
        keys[owners, columns] = keys_of(score_rows(log_probs, item_tokens, owners, chosen), chosen)
        return keys
    owners = torch.arange(rows.shape[0], device=rows.device).repeat_interleave(rows.shape[1])
    scores = score_rows(log_probs, item_tokens, owners, rows.flatten()).view(rows.shape)
    return keys_of(scores, rows).masked_fill_(~fresh, NOTHING)


def _top(keys: Tensor, count: int) -> Tensor:
    return keys.topk(min(count, keys.shape[1]), dim=1).values
