"""Choosing the best children of all beams, the same for target and draft.

Ties go to the lower trie node, which is the lexicographically smaller semantic id; prefixes that
came after the trie was built (kernels/trie_overlay.py) stand after all others of their level.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.core.beams import Beams

DEAD = float("-inf")


def keep_best(beams: Beams, nodes: Tensor, total: Tensor, widths: list[int]) -> Beams:
    """One level deeper: the best allowed children of each request.

    nodes, total [B, W * M]: children of all beams and their log-probabilities, -inf where there is
    none.
    widths: how many of them each request keeps.
    """
    trie, width = beams.trie, beams.nodes.shape[1]
    for b, allowed in enumerate(beams.filters):
        if allowed is not None:
            total[b].masked_fill_(allowed.remaining(trie.leaves(nodes[b])) <= 0, DEAD)
    kept, index = _best(total, nodes, min(max(widths), total.shape[1]))
    rank = torch.arange(kept.shape[1], device=nodes.device)
    kept = kept.masked_fill(rank >= torch.tensor(widths, device=nodes.device)[:, None], DEAD)
    used = max(int((kept > DEAD).sum(1).max()), 1)
    kept, index = kept[:, :used], index[:, :used]
    chosen = torch.where(kept > DEAD, nodes.gather(1, index), 0)
    parents = index // (total.shape[1] // width)
    above = parents[..., None].expand(-1, -1, beams.level)
    return replace(
        beams,
        level=beams.level + 1,
        nodes=chosen,
        log_probs=kept,
        paths=torch.cat([beams.paths.gather(1, above), chosen[..., None]], dim=-1),
        parents=parents,
    )


def _best(total: Tensor, nodes: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best columns of each row, equal scores in the order of their trie nodes."""
    kept, index = total.topk(width, dim=1)
    last = kept[:, -1:]
    if bool((((total == last).sum(1) > (kept == last).sum(1)) & (last[:, 0] > DEAD)).any()):
        # More candidates tie with the last kept one than fit: choose among them by node.
        by_node = torch.sort(nodes, dim=1).indices
        ranked = descending(total.gather(1, by_node))[:, :width]
        index = by_node.gather(1, ranked)
        kept = total.gather(1, index)
    return kept, index


def descending(values: Tensor) -> Tensor:
    """Order of each row, largest first, equal values as they come."""
    return torch.sort(values, dim=1, descending=True, stable=True).indices
