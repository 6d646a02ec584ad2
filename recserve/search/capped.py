"""The answer to a request with caps: a slate, or the same search once more among fewer items.

Caps are applied to what a search of the asked width found. Where they leave fewer than k and the
search was not exhaustive, the items of all full groups are closed, like a filter, and the same
search is made again; what is chosen stays chosen. Each search adds an item at least, so there are
k at most, and in the end k are chosen or no item is left that could stand beside the others.
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
    """The k best under the caps, what earlier searches chose among them.

    rows, scores [n]: what the search found, best first. complete: it left out no item that it was
    allowed to find. ranked: by score, then by item row; else in the order in which they came.
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
    """Item rows behind those that earlier searches chose."""
    return rows if sequence.chosen is None else np.concatenate([sequence.chosen.rows, rows])
