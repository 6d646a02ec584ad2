"""One level deeper, all children of all beams at once, without waiting for the device.

Shapes follow from what the host knows, the beam width and the widest node of each level; dead beams
and padding are computed with the others. On a CPU descent.py does without them. Ties go to the
lower trie node, which is the lexicographically smaller semantic id; prefixes that came after the
trie was built (kernels/trie/trie_overlay.py) stand after all others of their level.

What can no longer enter an answer, so that nothing is spent on it.

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
from recserve.kernels import dispatch
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_children import DEAD, BestChildren, ChildQuery
from recserve.search.beams import Beams

NO_BOUND = 2**31  # past every place
ROUNDING = 1e-4  # a dense candidate's score and a beam's are sums in different orders


def bound_places(requests: Seq[SlateQuery], device: torch.device) -> Tensor | None:
    """[B, 1] place, from 0, of the score that bounds each request; NO_BOUND where none may: as many
    items are wanted as beams are kept, or caps let items of lower scores in. None: for all.
    """
    places = [r.k - 1 if r.k < r.width and not r.caps else NO_BOUND for r in requests]
    if min(places) == NO_BOUND:
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


def best_children(
    beams: Beams, logits: Tensor, widths: list[int], normalizers: Tensor | None = None
) -> Beams:
    """One level deeper: the best allowed children of each request, best first, ties to the lower
    trie node, but for those that cannot enter its answer any more.

    logits [B * W, C]: of the level's codes at each beam; any finite row where the beam is dead or
    has one child. normalizers [B * W]: subtracted from them; None: the log-sum-exp over the valid
    children. widths: how many children each request keeps.
    """
    trie, width = beams.trie, beams.nodes.shape[1]
    widest = trie.widths[beams.level]
    query = ChildQuery(
        nodes=beams.nodes,
        log_probs=beams.log_probs,
        logits=logits,
        width=widest,
        keep=min(max(widths), width * widest),
        normalizers=normalizers,
        filters=beams.filters.left,
    )
    found = dispatch.best_children(trie, query)
    return deeper(beams, found.nodes, still_of_use(beams, found, widths), found.parents)


def still_of_use(beams: Beams, best: BestChildren, widths: list[int]) -> Tensor:
    """[B, n] log-probabilities of the best children, -inf past each request's width and where they
    cannot enter its answer any more.
    """
    kept = best.log_probs
    if min(widths) < kept.shape[1]:
        rank = torch.arange(kept.shape[1], device=kept.device)
        kept = kept.masked_fill(rank >= on_device(widths, kept.device)[:, None], DEAD)
    return above_bound(beams, best.nodes, kept)


def deeper(beams: Beams, nodes: Tensor, kept: Tensor, parents: Tensor) -> Beams:
    """Beams of the next level. nodes, kept, parents [B, n]: trie nodes, log-probabilities, columns
    of the beams above.
    """
    chosen = torch.where(kept > DEAD, nodes, beams.trie.any_leaf)
    above = parents[..., None].expand(-1, -1, beams.level)
    paths = torch.cat([beams.paths.gather(1, above), chosen[..., None]], dim=-1)
    return beams.at(beams.level + 1, chosen, kept, paths, parents)
