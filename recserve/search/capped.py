"""Slates under diversity caps.

Caps apply to the items that a search of the requested width found. If they leave fewer than k
items, and the search did not see all items, the same search is repeated with the items of all full
groups filtered out. Chosen items stay chosen. Each search adds at least one item, so there are at
most k searches. They end when k items are chosen or no remaining item satisfies the caps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import first_k, still_open
from recserve.core.request import Continuation, Slate, SlateQuery
from recserve.core.sequence import Sequence


def answer(
    sequence: Sequence,
    rows: np.ndarray,
    scores: np.ndarray,
    complete: bool,
    exact: bool,
    ranked: bool = True,
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

    Returns:
        The slate, or the next search if the caps left too few items.
    """
    request, before = sequence.request, sequence.chosen
    assert isinstance(request, SlateQuery)
    rows = with_chosen(sequence, rows)
    if before is not None:
        scores = np.concatenate([before.scores, scores])
    places = first_k(rows, request.caps, request.k)
    rows, scores = rows[places].astype(np.int64), scores[places]
    if request.caps and rows.size < request.k and not complete:
        open_ = still_open(rows, request.caps, request.allowed, request.trie.num_rows)
        if request.excluded is not None:
            open_[request.excluded] = False
        if open_.any():
            allowed = AllowedItems.of(open_)
            return Continuation(replace(request, allowed=allowed, excluded=None), rows, scores)
    if ranked and before is not None:
        order = np.lexsort((rows, -scores))
        rows, scores = rows[order], scores[order]
    return Slate(rows, scores, exact, sequence.rounds, sequence.timing)


def with_chosen(sequence: Sequence, rows: np.ndarray) -> np.ndarray:
    """Returns the item rows that earlier searches chose, followed by `rows`."""
    return rows if sequence.chosen is None else np.concatenate([sequence.chosen.rows, rows])
