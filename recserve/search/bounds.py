"""What can no longer enter an answer, so that nothing is spent on it.

Log-probabilities are at most 0, so nothing below a prefix scores more than the prefix; and where
levels are normalised over the valid children, a prefix with one item below has its item's score
already. So a prefix under the k-th best such score, the bound, leads to no item of the k best. It
may be left out of its level, and beam search stays what it was above the bound: children above it
have parents above it, and what is under it displaces nothing that is above. If what is above fills
the whole width, an item that set the bound can be displaced further down; but then no prefix that
was kept is under the bound, nothing was left out, and the next level sets a bound of its own.
Prefixes that tie with the bound stay.

The same holds of any number below which prefixes are left out: what is kept is what full beam
search has above it, and where that is k items in the end, they are the k best.

With a dense head a prefix gains at most what the dense head gives its best item. The items that the
dense head proposes itself (`DenseCandidates`) compete anyway. So the bound is taken with their
scores, and a prefix is given the share of the last of them, since no other item has more.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_children import DEAD
from recserve.search.beams import Beams

NEVER = 2**31  # past every place
ROUNDING = 1e-4  # a dense candidate's score and a beam's are sums in different orders


def bound_places(requests: Seq[SlateQuery], device: torch.device) -> Tensor | None:
    """[B, 1] place, from 0, of the score that bounds each request; NEVER where none may: as many
    items are wanted as beams are kept, or caps let items of lower scores in. None: for all.
    """
    places = [r.k - 1 if r.k < r.width and not r.caps else NEVER for r in requests]
    if min(places) == NEVER:
        return None
    return on_device(places, device)[:, None]


def above_bound(beams: Beams, nodes: Tensor, log_probs: Tensor) -> Tensor:
    """log_probs with -inf where the prefix cannot enter the answer.

    nodes, log_probs [B, n]: prefixes kept at one level.
    """
    places, dense_candidates = beams.places, beams.dense_candidates
    if places is None or (dense_candidates is not None and dense_candidates.log_probs is None):
        return log_probs
    below = beams.trie.leaves(nodes)
    single = below.last - below.first == 1
    if dense_candidates is None:
        known = torch.where(single, log_probs, DEAD)
        return log_probs.masked_fill(log_probs < value_at(known, places), DEAD)
    rows = beams.trie.leaf_rows[below.first].long()
    scores = log_probs + dense_candidates.weights * dense_candidates.dense.gather(1, rows)
    known = torch.where(single & ~dense_candidates.among(rows), scores, DEAD)
    bound = value_at(torch.cat([known, dense_candidates.scores], dim=1), places)
    return log_probs.masked_fill(log_probs + dense_candidates.share < bound - ROUNDING, DEAD)


def value_at(values: Tensor, places: Tensor) -> Tensor:
    """[B, 1] the value at each row's place from the largest down, -inf past the last."""
    ranked = values.sort(dim=1, descending=True).values
    size = values.shape[1]
    ranked = ranked.gather(1, places.clamp(max=size - 1))
    return ranked.masked_fill(places >= size, DEAD)
