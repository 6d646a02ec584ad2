"""Items whose levels fit a user's state best: all of them scored, or those on the way through the
graph of similar items.

The graph is walked from entries spread over the catalogue and from the user's latest items, where
the request allows most of the catalogue and the graph knows nearly all of it: a walk scores what is
newer. Otherwise all items are scored, and so they are where the walk found fewer than k.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recserve.core.request import SlateQuery
from recserve.kernels.host import on_device
from recserve.kernels.trie.item_graph import GraphWalk, search
from recserve.kernels.trie.item_scores import NOTHING, best_of_all
from recserve.kernels.trie.trie_view import gone_rows

WALK_STEPS = 3
NUM_RECENT_ITEMS = 8
MAX_UNKNOWN_SHARE = 1 / 16  # of the rows, newer than the graph, of which each walk scores every one


def best_items(
    requests: Seq[SlateQuery], log_probs: Tensor, item_tokens: Tensor, first_item: int | None
) -> Tensor:
    """Rank keys of the best usable items of requests over one trie.

    log_probs: [B, V] of each token at its own level. item_tokens: [I, L] of the trie's items.
    first_item: token of item row 0 where roots hold items, None where they hold codes.
    Returns [B, the largest k], NOTHING where a request has no more usable items.
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
            GraphWalk(k=most, width=_width(first), steps=WALK_STEPS),
        )
        best[own] = found.best
    counts = (best != NOTHING).sum(1).tolist() if walking else [0] * len(requests)
    rest = [b for b, request in enumerate(requests) if counts[b] < min(request.k, items)]
    if rest:
        own = on_device(rest, best.device)
        left = None if usable is None else usable[own]
        best[own] = best_of_all(log_probs[own], item_tokens, left, most)
    return best


def usable_items(requests: Seq[SlateQuery], items: int, device: torch.device) -> Tensor | None:
    """[B, I] bool: what each request and the catalogue allow; None: everything."""
    gone = gone_rows(requests[0].trie)
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
    """[B, s] rows of the last items of each history, -1 where there are fewer or none are known."""
    if first_item is None:
        return torch.full((len(requests), 0), -1, device=requests[0].root.inputs.tokens.device)
    tokens = [request.root.inputs.tokens[-NUM_RECENT_ITEMS:] - first_item for request in requests]
    rows = pad_sequence(tokens, batch_first=True, padding_value=-1)
    return torch.where((rows >= 0) & (rows < items), rows, -1)


def _walking_together(requests: Seq[SlateQuery], items: int) -> list[list[int]]:
    """Numbers of the requests that walk the same graph with the same width."""
    parts: dict[tuple[int, int], list[int]] = {}
    for b, request in enumerate(requests):
        open_ = request.allowed is None or 2 * request.allowed.count >= items
        graph = request.graph
        if graph is not None and open_ and items - graph.num_items <= MAX_UNKNOWN_SHARE * items:
            parts.setdefault((id(graph), _width(request)), []).append(b)
    return list(parts.values())


def _width(request: SlateQuery) -> int:
    """Items followed in the last step: as many as a beam search would keep."""
    return max(request.beam_width, request.k)
