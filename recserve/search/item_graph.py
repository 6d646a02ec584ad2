"""Best items under independent level heads, by scoring all items or by walking the item graph.

A walk starts from entries spread over the catalogue and from the user's latest items. It is used if
the request allows at least half of the items and the graph covers nearly all of them. A walk also
scores every item that is newer than the graph. All items are scored for other requests, and for
walks that find fewer than k items.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recserve.core.request import SlateQuery
from recserve.kernels.host import on_device
from recserve.kernels.item_graph import NOTHING, GraphWalk, best_of_all, search

WALK_STEPS = 3
NUM_RECENT_ITEMS = 8
# Largest share of items newer than the graph. A walk scores every one of them.
MAX_UNKNOWN_SHARE = 1 / 16


def best_items(
    requests: Seq[SlateQuery], log_probs: Tensor, item_tokens: Tensor, first_item: int | None
) -> Tensor:
    """Returns rank keys of the best usable items of requests over one trie.

    Args:
        requests: B requests.
        log_probs: [B, V] log-probability of each token at its own level.
        item_tokens: [I, L] tokens of the trie's items.
        first_item: Token of item row 0 if histories hold items. None if they hold codes.

    Returns:
        [B, largest k] rank keys, NOTHING where a request has no more usable items.
    """
    items, most = item_tokens.shape[0], max(request.k for request in requests)
    usable = usable_items(requests, items, item_tokens.device)
    best = torch.full((len(requests), most), NOTHING, device=item_tokens.device)
    walking = _walking_together(requests, items)
    for part in walking:
        first, own = requests[part[0]], on_device(part, best.device)
        assert first.graph is not None
        seeds = latest_items([requests[b] for b in part], items, first_item)
        found = search(
            first.graph,
            log_probs[own],
            item_tokens,
            seeds,
            None if usable is None else usable[own],
            GraphWalk(k=most, width=first.width, steps=WALK_STEPS),
        )
        best[own] = found.best
    # Walks that found too few items fall back to scoring all of them.
    counts = (best != NOTHING).sum(1).tolist() if walking else [0] * len(requests)
    rest = [b for b, request in enumerate(requests) if counts[b] < min(request.k, items)]
    if rest:
        own = on_device(rest, best.device)
        left = None if usable is None else usable[own]
        best[own] = best_of_all(log_probs[own], item_tokens, left, most)
    return best


def usable_items(requests: Seq[SlateQuery], items: int, device: torch.device) -> Tensor | None:
    """Returns [B, I] bool: the items that each request and the catalogue allow. None: all items."""
    gone = requests[0].trie.removed_rows
    open_ = all(r.allowed is None and (r.excluded is None or not r.excluded.size) for r in requests)
    if open_ and gone is None:
        return None
    usable = torch.ones(len(requests), items, dtype=torch.bool, device=device)
    for b, request in enumerate(requests):
        if request.allowed is not None:
            usable[b] = on_device(request.allowed.mask(), device)
        if request.excluded is not None:
            usable[b].index_fill_(0, on_device(request.excluded, device, torch.int64), False)
    if gone is not None:
        usable.index_fill_(1, gone, False)
    return usable


def latest_items(requests: Seq[SlateQuery], items: int, first_item: int | None) -> Tensor:
    """Returns [B, s] rows of the last items of each history, -1 for unknown or missing ones."""
    if first_item is None:
        return torch.full((len(requests), 0), -1, device=requests[0].root.inputs.tokens.device)
    tokens = [request.root.inputs.tokens[-NUM_RECENT_ITEMS:] - first_item for request in requests]
    rows = pad_sequence(tokens, batch_first=True, padding_value=-1)
    return torch.where((rows >= 0) & (rows < items), rows, -1)


def _walking_together(requests: Seq[SlateQuery], items: int) -> list[list[int]]:
    """Returns groups of request numbers that walk the same graph with the same width."""
    parts: dict[tuple[int, int], list[int]] = {}
    for b, request in enumerate(requests):
        open_ = request.allowed is None or 2 * request.allowed.count >= items
        graph = request.graph
        if graph is not None and open_ and items - graph.num_items <= MAX_UNKNOWN_SHARE * items:
            parts.setdefault((id(graph), request.width), []).append(b)
    return list(parts.values())
