"""Slates from finished searches, under diversity caps.

Caps apply to the items that a search of the requested width found. If they leave fewer than k
items, and the search did not see all items, the same search is repeated with the items of all full
groups filtered out. Chosen items stay chosen. Each search adds at least one item, so there are at
most k searches. They end when k items are chosen or no remaining item satisfies the caps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import first_k, still_open
from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Slate, SlateQuery
from recserve.core.sequence import SearchSequence
from recserve.kernels.trie.level_search import DEAD
from recserve.search.beam_search import BeamSearch


def slates(
    search: BeamSearch, exact: bool, divisors: Tensor | None = None, by_sum: bool = True
) -> list[Slate | Continuation | NotFinite]:
    """Returns the k best items of each request under its caps, best first, ties in item-row order.

    A request with fewer live beams than its width has found all items that it allows. A request
    whose states or scores are not finite gets NotFinite.

    Args:
        search: A finished search. Its dense candidates have log-probabilities.
        exact: Whether all scores are the target's own.
        divisors: [B, W] what divides the score of each beam. None: 1. There are no dense candidates
            then.
        by_sum: Whether the divided scores are in the order of the sums. If not, a slate is exact
            only if the search has found all items that it allows.
    """
    beams = search.beams
    rows, scores = search.trie.items_of_leaves(beams.nodes), beams.log_probs
    log_probs: np.ndarray | None = None
    if exact and any(request.log_probs for request in search.requests):
        scored = search.dense_candidates
        parts = (
            [scores] if scored is None or scored.log_probs is None else [scores, scored.log_probs]
        )
        log_probs = torch.cat(parts, dim=1).cpu().numpy()
    if divisors is not None:
        scores = scores / divisors
    if (candidates := search.dense_candidates) is not None:
        rows, alive = rows.long(), beams.alive()
        scores = scores + candidates.weights * candidates.dense.gather(1, rows)
        # Candidates that are beams already must not appear twice.
        again = ((candidates.rows[:, :, None] == rows[:, None, :]) & alive[:, None, :]).any(-1)
        alive = torch.cat([alive, candidates.valid & ~again], dim=1)
        rows = torch.cat([rows, candidates.rows], dim=1)
        scores = torch.cat([scores, candidates.scores], dim=1).masked_fill(~alive, DEAD)
    if (
        search.nonfinite is not None
    ):  # one more column, -inf or NaN, so that the host reads one tensor
        scores = torch.cat([scores, (search.nonfinite + DEAD)[:, None]], dim=1)
        rows = F.pad(rows, (0, 1))
    rows_read, scores_read = rows.cpu().numpy(), scores.cpu().numpy()
    nonfinite = np.isnan(scores_read).any(axis=1)
    # The host sorts so few numbers faster than a device could start.
    order = np.lexsort((rows_read, -scores_read))
    answers: list[Slate | Continuation | NotFinite] = []
    alive_read = scores_read > DEAD
    num_alive = np.count_nonzero(alive_read[:, : beams.nodes.shape[1]], axis=1)
    for b, (sequence, width) in enumerate(zip(search.sequences, search.widths, strict=True)):
        if nonfinite[b]:
            answers.append(NotFinite())
            continue
        places = order[b, : np.count_nonzero(alive_read[b])]
        found = rows_read[b, places], scores_read[b, places]
        answers.append(
            slate_under_caps(
                sequence,
                *found,
                complete=bool(num_alive[b] < width),
                exact=exact and (by_sum or bool(num_alive[b] < width)),
                log_probs=None if log_probs is None else log_probs[b, places],
            )
        )
    return answers


def slate_under_caps(
    sequence: SearchSequence,
    rows: np.ndarray,
    scores: np.ndarray,
    complete: bool,
    exact: bool,
    ranked: bool = True,
    log_probs: np.ndarray | None = None,
) -> Slate | Continuation:
    """Returns the k best items under the caps, including those that earlier searches chose.

    Args:
        sequence: The request.
        rows: [n] item rows that the search found, best first.
        scores: [n] their scores.
        complete: Whether the search returned every item that it was allowed to find.
        exact: Whether the search equals full beam search.
        ranked: Whether the slate is sorted by score, then by item row. Otherwise items stay in the
            order in which they were chosen.
        log_probs: [n] log-probabilities of the items under the target; None if it gave none.

    Returns:
        The slate, or the next search if the caps left too few items.
    """
    request, before = sequence.request, sequence.chosen
    assert isinstance(request, SlateQuery)
    rows = with_chosen(sequence, rows)
    if before is not None:
        scores = np.concatenate([before.scores, scores])
        if log_probs is not None and before.log_probs is not None:
            log_probs = np.concatenate([before.log_probs, log_probs])
    places = first_k(rows, request.caps, request.k)
    rows, scores = rows[places].astype(np.int64), scores[places]
    log_probs = log_probs[places] if log_probs is not None and request.log_probs else None
    if request.caps and rows.size < request.k and not complete:
        open_ = still_open(rows, request.caps, request.allowed, request.trie.num_rows)
        if request.excluded is not None:
            open_[request.excluded] = False
        if open_.any():
            allowed = AllowedItems.of(open_)
            again = replace(request, allowed=allowed, excluded=None)
            return Continuation(again, rows, scores, log_probs)
    if ranked and before is not None:
        order = np.lexsort((rows, -scores))
        rows, scores = rows[order], scores[order]
        log_probs = None if log_probs is None else log_probs[order]
    return Slate(rows, scores, exact, sequence.rounds, sequence.timing, log_probs=log_probs)


def with_chosen(sequence: SearchSequence, rows: np.ndarray) -> np.ndarray:
    """Returns the item rows that earlier searches chose, followed by `rows`."""
    return rows if sequence.chosen is None else np.concatenate([sequence.chosen.rows, rows])
