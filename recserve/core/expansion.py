"""One level deeper, all children of all beams at once, without waiting for the device.

Shapes follow from what the host knows, the beam width and the widest node of each level; dead beams
and padding are computed with the others. On a CPU core/descent.py does without them. Ties go to the
lower trie node, which is the lexicographically smaller semantic id; prefixes that came after the
trie was built (kernels/trie_overlay.py) stand after all others of their level.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recserve.core.beams import Beams
from recserve.core.bounds import above_bound
from recserve.kernels import dispatch
from recserve.kernels.host import on_device
from recserve.kernels.leaf_filter import LeafFilter
from recserve.kernels.trie_children import DEAD, BestChildren, LeafBits, leaf_bits
from recserve.kernels.trie_overlay import AnyTrie


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
    left = filters_of(trie, beams.filters)
    found = dispatch.best_children(
        trie,
        beams.nodes,
        beams.log_probs,
        logits,
        widest,
        min(max(widths), width * widest),
        normalizers,
        left.excluded,
        left.allowed,
    )
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


@dataclass(frozen=True)
class Left:
    """What B requests allow, as kernels read it: one of the two, or neither.

    excluded [B, X] int32: leaf ranks, ascending, padded with the number of items. allowed: bits.
    """

    excluded: Tensor | None = None
    allowed: LeafBits | None = None


def filters_of(trie: AnyTrie, filters: Seq[LeafFilter | None], in_bits: bool = False) -> Left:
    """The filters of requests over one trie; None: the request allows everything. in_bits: as bits
    whatever they are.
    """
    if all(f is None for f in filters) and not in_bits:
        return Left()
    items, device = trie.num_items, trie.device
    if all(f is None or f.before is None for f in filters) and not in_bits:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        lists = [torch.cat([nothing, *(f.excluded if f else ())]).sort().values for f in filters]
        return Left(pad_sequence(lists, batch_first=True, padding_value=items).int())
    allowed = torch.ones(len(filters), items + 1, dtype=torch.bool, device=device)
    for own, f in zip(allowed, filters, strict=True):
        if f is not None and f.before is not None:
            own[:-1] = f.before.diff() > 0
        elif f is not None:
            for ranks in f.excluded:
                own.index_fill_(0, ranks, False)
    return Left(None, leaf_bits(allowed[:, :-1]))
