"""Expansion of beams by one level, and the bounds that drop prefixes which cannot enter a result.

The expansion computes all children of all beams at once and does not wait for the device. Its
shapes follow from host values only: the beam width and the widest node of each level. Dead beams
and padding are computed with the others. On a CPU, descent.py does the same in C without them. Ties
go to the lower trie node, which is the lexicographically smaller semantic id. Prefixes added after
the trie was built (kernels/trie/trie.py) rank after all others of their level.

The bound rests on two facts:

- Log-probabilities are at most 0, so no item below a prefix scores more than the prefix.
- If levels are normalised over the valid children, a prefix with one item below already has that
  item's score.

Let the bound be the k-th best score of such single items. A prefix below the bound leads to none of
the k best items, so its level may drop it. Above the bound, beam search is unchanged: a child above
the bound has a parent above it, and a prefix below the bound displaces nothing above it. If
prefixes above the bound fill the whole width, the item that sets the bound can still be displaced
at a deeper level. In that case no kept prefix was below the bound, so nothing was dropped, and the
next level computes its own bound. Prefixes that tie with the bound stay.

The same argument holds for any threshold: above it, the search finds what full beam search finds.
If k finished items are above it, they are the k best.

With a dense head, a prefix gains at most the head's weighted log-probability of its best item. The
head's own best items (`DenseCandidates`) always compete, so the bound includes their scores. Any
other item gains at most as much as the last of them, so each prefix is credited with that share.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.kernels.host import on_device
from recserve.kernels.trie import level_search
from recserve.kernels.trie.level_search import DEAD, BestChildren, ChildQuery
from recserve.search.beams import Beams

NO_BOUND = 2**31  # larger than any rank
ROUNDING = 1e-4  # scores of dense candidates and of beams are summed in different orders


def bound_places(requests: Seq[SlateQuery], device: torch.device) -> Tensor | None:
    """Returns [B, 1] the rank, from 0, of the score that bounds each request.

    The rank is NO_BOUND if k equals the beam width, or if caps admit items of lower scores.

    Returns:
        None if no request has a bound.
    """
    places = [r.k - 1 if r.k < r.width and not r.caps else NO_BOUND for r in requests]
    if min(places) == NO_BOUND:
        return None
    return on_device(places, device)[:, None]


def above_bound(beams: Beams, nodes: Tensor, log_probs: Tensor) -> Tensor:
    """Returns log_probs [B, n] with -inf for prefixes [B, n] that cannot enter the result.

    Args:
        beams: The requests.
        nodes: [B, n] trie nodes of one level.
        log_probs: [B, n].
    """
    places, dense_candidates = beams.places, beams.dense_candidates
    if places is None or (dense_candidates is not None and dense_candidates.log_probs is None):
        return log_probs
    below = beams.trie.leaves(nodes)
    single = below.last - below.first == 1
    if dense_candidates is None:
        known = torch.where(single, log_probs, DEAD)
        return log_probs.masked_fill(log_probs < value_at(known, places), DEAD)
    # The first leaf below is the item of a single prefix; other entries are not used.
    rows = beams.trie.leaf_rows[below.first].long()
    scores = log_probs + dense_candidates.weights * dense_candidates.dense.gather(1, rows)
    known = torch.where(single & ~dense_candidates.among(rows), scores, DEAD)
    bound = value_at(torch.cat([known, dense_candidates.scores], dim=1), places)
    return log_probs.masked_fill(log_probs + dense_candidates.share < bound - ROUNDING, DEAD)


def value_at(values: Tensor, places: Tensor) -> Tensor:
    """Returns [B, 1] the value at each row's rank, largest first, -inf past the last."""
    ranked = values.sort(dim=1, descending=True).values
    size = values.shape[1]
    ranked = ranked.gather(1, places.clamp(max=size - 1))
    return ranked.masked_fill(places >= size, DEAD)


def best_children(
    beams: Beams, logits: Tensor, widths: list[int], normalizers: Tensor | None = None
) -> Beams:
    """Returns the beams of the next level: the best allowed children of each request.

    Children are ordered best first, ties by the lower trie node. Those that cannot enter the result
    are dead.

    Args:
        beams: The parents.
        logits: [B * W, C] logits of the level's codes at each beam. Any finite row will do where a
            beam is dead or has one child.
        widths: Beam width of each request.
        normalizers: [B * W] subtracted from the logits. None: the log-sum-exp over the valid
            children.
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
    found = level_search.best_children(trie, query)
    return deeper(beams, found.nodes, pruned_log_probs(beams, found, widths), found.parents)


def pruned_log_probs(beams: Beams, best: BestChildren, widths: list[int]) -> Tensor:
    """Returns [B, n] log-probabilities of the best children, -inf where they are dropped.

    Children past the beam width, or below the bound, are dropped.
    """
    log_probs = best.log_probs
    if min(widths) < log_probs.shape[1]:
        rank = torch.arange(log_probs.shape[1], device=log_probs.device)
        log_probs = log_probs.masked_fill(
            rank >= on_device(widths, log_probs.device)[:, None], DEAD
        )
    return above_bound(beams, best.nodes, log_probs)


def deeper(beams: Beams, nodes: Tensor, log_probs: Tensor, parents: Tensor) -> Beams:
    """Returns the beams of the next level.

    Args:
        beams: The level above.
        nodes: [B, n] trie nodes.
        log_probs: [B, n] log-probabilities, -inf where dead.
        parents: [B, n] columns of the parents.
    """
    chosen = torch.where(log_probs > DEAD, nodes, beams.trie.any_leaf)
    # A path is the parent's path and the chosen node.
    above = parents[..., None].expand(-1, -1, beams.level)
    paths = torch.cat([beams.paths.gather(1, above), chosen[..., None]], dim=-1)
    return beams.at(beams.level + 1, chosen, log_probs, paths, parents)
