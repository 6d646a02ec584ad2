"""Choosing the best children of all beams, the same for target and draft.

Ties go to the lower trie node, which is the lexicographically smaller semantic id; prefixes that
came after the trie was built (kernels/trie_overlay.py) stand after all others of their level.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.bounds import above_bound
from recserve.kernels.host import on_device
from recserve.kernels.trie_children import DEAD, BestChildren


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
    return replace(
        beams,
        level=beams.level + 1,
        nodes=chosen,
        log_probs=kept,
        paths=torch.cat([beams.paths.gather(1, above), chosen[..., None]], dim=-1),
        parents=parents,
    )


def descending(values: Tensor) -> Tensor:
    """Order of each row, largest first, equal values as they come."""
    return torch.sort(values, dim=1, descending=True, stable=True).indices
