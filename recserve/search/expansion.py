"""One level deeper, all children of all beams at once, without waiting for the device.

Shapes follow from what the host knows, the beam width and the widest node of each level; dead beams
and padding are computed with the others. On a CPU descent.py does without them. Ties go to the
lower trie node, which is the lexicographically smaller semantic id; prefixes that came after the
trie was built (kernels/trie/trie_overlay.py) stand after all others of their level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_children import DEAD, BestChildren, ChildQuery
from recserve.search.beams import Beams
from recserve.search.bounds import above_bound


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
