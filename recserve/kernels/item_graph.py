"""Search over a graph of similar items: finds good items while scoring only few of them.

From its seeds, a request moves `steps` times to the neighbours of the best items scored so far.
Many requests move together in tensors of fixed shape. An item costs one table look-up per level.
Source: RPG (KDD 2025, section 3.3); seeds are given here instead of drawn.

The levels of these items are scored independently: an item's score is the mean of L table entries.
A rank key is one int64 that holds an item and its score. The larger key is the better item; ties
resolve to the lower row. So one `topk` finds the best items, in any order and on any device.
Bytes moved for n items: n * L * (8 for the token + 4 for its log-probability).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 65_536
LANES = 8  # a pass over the items costs the same for 1 to 8 requests
NOTHING = torch.iinfo(torch.int64).min
ROW_BITS = 32
LAST_ROW = 2**ROW_BITS - 1


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


def keys_of(scores: Tensor, rows: Tensor) -> Tensor:
    """Returns rank keys.

    Args:
        scores: float32, no NaN.
        rows: 0 .. 2**32 - 1, broadcast against scores.
    """
    keys = _flip_order(scores.contiguous().view(torch.int32)).long()
    # In place, because the catalogue's keys are the largest tensor of a request.
    keys.bitwise_left_shift_(ROW_BITS).bitwise_or_(LAST_ROW - rows)
    return keys


def rows_of(keys: Tensor) -> Tensor:
    """Returns the item row of each rank key; undefined for NOTHING."""
    rows: Tensor = LAST_ROW - (keys & LAST_ROW)
    return rows


def scores_of(keys: Tensor) -> Tensor:
    """Returns the float32 score of each rank key; undefined for NOTHING."""
    return _flip_order((keys >> ROW_BITS).to(torch.int32)).view(torch.float32)


def score_rows(log_probs: Tensor, item_tokens: Tensor, owners: Tensor, rows: Tensor) -> Tensor:
    """Returns the scores of n (request, item) pairs.

    Args:
        log_probs: [B, V] of each token at its own level.
        item_tokens: [I, L].
        owners: [n] request of each pair.
        rows: [n] item row of each pair.

    Returns:
        [n] float32, the mean over the L levels.
    """
    places = item_tokens[rows] + (owners * log_probs.shape[1])[:, None]
    return log_probs.flatten()[places].mean(-1)


def best_of_all(log_probs: Tensor, item_tokens: Tensor, usable: Tensor | None, k: int) -> Tensor:
    """Scores all items and returns the rank keys of the k best of each request.

    Args:
        log_probs: [B, V].
        item_tokens: [I, L].
        usable: [B, I] bool. None means all items.
        k: Items per request.

    Returns:
        [B, k], best first, padded with NOTHING where fewer than k items are usable.
    """
    batch = log_probs.shape[0]
    table = F.pad(log_probs, (0, 0, 0, -batch % LANES)).T.contiguous()
    best = torch.full((batch, k), NOTHING, device=log_probs.device)
    for start in range(0, item_tokens.shape[0], CHUNK):
        tokens = item_tokens[start : start + CHUNK]
        rows = torch.arange(start, start + tokens.shape[0], device=table.device)
        scores = F.embedding_bag(tokens, table, mode="sum")[:, :batch].T / tokens.shape[1]
        keys = keys_of(scores, rows)
        if usable is not None:
            keys.masked_fill_(~usable[:, start : start + CHUNK], NOTHING)
        nearest = keys.topk(min(k, keys.shape[1]), dim=1).values
        best = torch.cat([best, nearest], dim=1).topk(k, dim=1).values
    return best


def _flip_order(bits: Tensor) -> Tensor:
    """Maps int32 bits of a float to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
