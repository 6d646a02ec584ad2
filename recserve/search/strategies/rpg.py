"""Strategy `rpg`: items scored by independent level heads from the prefix's last hidden state.

It uses no tree and no forward after the prefix. Given the state, the codes of an item are
independent of each other. An item's score is the mean over levels of their log-probabilities. The
result differs from beam search, so it is never `exact`.

The best items are found by scoring all items or by walking the item graph. A walk starts from
entries spread over the catalogue and from the user's latest items. It is used if the request allows
at least half of the items and the graph covers nearly all of them. A walk also scores every item
that is newer than the graph. All items are scored for other requests, and for walks that find fewer
than k items.

Source: RPG, KDD 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence, request_of, stacked_last_hidden
from recserve.core.strategy import OneRoundStrategy, Results
from recserve.kernels.host import on_device
from recserve.kernels.item_graph import NOTHING, GraphWalk, best_of_all, rows_of, scores_of, search
from recserve.models.semantic_id_model import SemanticIdModel, item_tables
from recserve.search.filters import usable_items
from recserve.search.slates import slate_under_caps
from recserve.search.strategy import Heads, RecommendStrategy

WALK_STEPS = 3
NUM_RECENT_ITEMS = 8
# Largest share of items newer than the graph. A walk scores every one of them.
MAX_UNKNOWN_SHARE = 1 / 16


class RpgStrategy(OneRoundStrategy, RecommendStrategy):
    """Scores by level heads, over the whole catalogue or along the item graph."""

    name = "rpg"
    auto = "fallback"
    missing = "this recommender has no level heads; train it with a recipe that has them"

    def __init__(self, model: SemanticIdModel) -> None:
        self.items = item_tables(model)
        self.tables = self.items.level_tables()
        self.first_item = model.template.first_item

    @classmethod
    def from_models(cls, model: SemanticIdModel, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with level heads."""
        return cls(model) if model.config.level_heads else None

    def results(self, sequences: Seq[SearchSequence], draft: None, hidden: None) -> Results:
        """Finds the items of all requests together."""
        requests = [request_of(s, SlateQuery) for s in sequences]
        log_probs = self.tables.log_probs(stacked_last_hidden(sequences))
        item_tokens = self.items.item_tokens[: requests[0].trie.num_rows]
        widened = [replace(request, k=_num_to_find(request)) for request in requests]
        # Rank keys [B, n], best first. Each request uses the first `_num_to_find` ones.
        best = best_items(widened, log_probs, item_tokens, self.first_item).cpu()
        counts = (best != NOTHING).sum(1).tolist()
        rows, scores = rows_of(best).numpy(), scores_of(best).numpy()
        answers = []
        for b, (sequence, request) in enumerate(zip(sequences, widened, strict=True)):
            n = min(request.k, counts[b])
            found, complete = (rows[b, :n], scores[b, :n]), n < request.k
            answers.append(slate_under_caps(sequence, *found, complete, exact=self.exact))
        return answers


def _num_to_find(request: SlateQuery) -> int:
    """Returns the number of items to find: k, or the beam width if caps may drop some."""
    return request.width if request.caps else request.k


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


def latest_items(requests: Seq[SlateQuery], items: int, first_item: int | None) -> Tensor:
    """Returns [B, s] rows of the last items of each history, -1 for unknown or missing ones."""
    if first_item is None:
        return torch.full((len(requests), 0), -1, device=requests[0].prefix.inputs.tokens.device)
    tokens = [request.prefix.inputs.tokens[-NUM_RECENT_ITEMS:] - first_item for request in requests]
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
