"""One level of beam search in the trie: the best children of all beams, and what a filter leaves.

A child's score and number are packed into one integer whose order is the order of the answer
(higher score first, then the lower node), so that one top-k without a tie chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.trie.trie import Leaves
from recserve.kernels.trie.trie_overlay import AnyTrie

DEAD = float("-inf")
LOW = 0xFFFFFFFF
LOWEST = -(2**63)


@dataclass(frozen=True)
class LeafBits:
    """Allowed leaves of B requests as bits, with a count in front of every word: two reads say how
    many are allowed before any rank. words, counts [B, I // 32 + 1] int32; 8 bytes per 32 items.
    """

    words: Tensor
    counts: Tensor

    def before(self, ranks: Tensor) -> Tensor:
        """Allowed leaves before each rank. ranks [B, n] in 0 : I + 1; same shape back, int32."""
        place = (ranks >> 5).long()
        words = self.words.gather(1, place) & ((1 << (ranks & 31).int()) - 1)
        return self.counts.gather(1, place) + popcount(words)

    def within(self, leaves: Leaves) -> Tensor:
        """[B, n] allowed leaves in each range, int32. leaves: [B, n]."""
        return self.before(leaves.last) - self.before(leaves.first)


@dataclass(frozen=True)
class Allowed:
    """What B requests allow. bits: of the base's leaves. added [B, A]: leaf ranks of later ones,
    ascending, padded with the number of items or more; None: there are none.
    """

    bits: LeafBits
    added: Tensor | None = None


def leaf_bits(allowed: Tensor) -> LeafBits:
    """allowed [B, I] bool over leaf ranks."""
    requests, items = allowed.shape
    padded = torch.zeros(requests, (items // 32 + 1) * 32, dtype=torch.bool, device=allowed.device)
    padded[:, :items] = allowed
    if allowed.device.type == "cpu":
        packed = np.packbits(padded.numpy(), axis=1, bitorder="little")
        return counted(torch.from_numpy(packed.view("<i4")))
    bits = padded.view(requests, -1, 32).int()
    return counted((bits << torch.arange(32, device=allowed.device)).sum(-1).int())


def counted(words: Tensor) -> LeafBits:
    """Bits with their counts. words [B, n] int32."""
    counts = popcount(words)
    return LeafBits(words, counts.cumsum(-1, dtype=torch.int32) - counts)


def listed(ranks: Tensor, leaves: Leaves) -> Tensor:
    """How many of the ascending ranks are in each range. ranks [n] or [B, n], leaves: as many
    rows.
    """
    last = torch.searchsorted(ranks, leaves.last.contiguous())
    return last - torch.searchsorted(ranks, leaves.first.contiguous())


def popcount(words: Tensor) -> Tensor:
    """Set bits of each int32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return (((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@dataclass(frozen=True)
class BestChildren:
    """One level deeper. nodes, parents, log_probs [B, k] in descending order; where log_probs is
    -inf there was none left, and the others are 0. parents: the beam each came from.
    """

    nodes: Tensor
    parents: Tensor
    log_probs: Tensor


def unpacked(keys: Tensor, width: int, keep: int) -> BestChildren:
    """The best of packed children. keys [B, W * width], width children to a beam."""
    kept, index = keys.topk(min(keep, keys.shape[1]), dim=1)
    ordered = (kept >> 32).int()
    log_probs = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    alive = log_probs > DEAD
    nodes = torch.where(alive, LOW - (kept & LOW), 0)
    parents = torch.where(alive, index // width, 0)
    return BestChildren(nodes, parents, torch.where(alive, log_probs, DEAD))


def packed(log_probs: Tensor, nodes: Tensor) -> Tensor:
    """int64 keys that order by log-probability, then by the lower node. Same shapes."""
    bits = (log_probs + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (LOW - nodes.long())


def child_log_probs(
    trie: AnyTrie,
    parents: Tensor,
    nodes: Tensor,
    logits: Tensor,
    width: int,
    normalizers: Tensor | None = None,
) -> Tensor:
    """[n, m] log-probabilities of m children of each of n nodes; some number or NaN where it is
    none of its children.

    parents [n], nodes [n, m]. logits [n, C], width, normalizers [n]: as for `best_children`.
    """
    logits, last = logits.float(), logits.shape[1] - 1
    if normalizers is not None:
        codes = trie.codes_of(nodes).long().clamp(max=last)
        return logits.gather(1, codes) - normalizers[:, None]
    children = trie.children(parents, width)
    gain = logits.gather(1, children.codes.long().clamp(max=last))
    gain = gain.masked_fill(~children.valid, DEAD).log_softmax(-1)
    places = trie.places(nodes, parents[:, None].expand_as(nodes))
    return gain.gather(1, places.long().clamp(0, width - 1))


def best_children(
    trie: AnyTrie,
    nodes: Tensor,
    log_probs: Tensor,
    logits: Tensor,
    width: int,
    keep: int,
    normalizers: Tensor | None = None,
    excluded: Tensor | None = None,
    allowed: Allowed | None = None,
) -> BestChildren:
    """The `keep` best allowed children of every request.

    nodes, log_probs [B, W]: beams of one level, -inf where dead. logits [B * W, C]: of the level's
    codes at each beam (any finite row where a beam has one child). width: most children of a node
    of this level (`Trie.widths`). normalizers [B * W]: subtracted from the logits; None: their
    log-sum-exp over the children of the beam, whether allowed or not. excluded [B, X]: leaf ranks,
    ascending, padded with the number of items. allowed: leaves instead. Raises ValueError for both.
    """
    batch = nodes.shape[0]
    children = trie.children(nodes.flatten(), width)
    gain = logits.float().gather(1, children.codes.long())
    if normalizers is None:
        gain = gain.masked_fill(~children.valid, DEAD).log_softmax(-1)
    else:
        gain = gain - normalizers[:, None]
    total = (log_probs.flatten()[:, None] + gain).masked_fill(~children.valid, DEAD)
    total, child = total.view(batch, -1), children.nodes.view(batch, -1)
    if excluded is not None or allowed is not None:
        left = _remaining(trie, child, excluded, allowed)
        total = total.masked_fill(left <= 0, DEAD)
    # A dead beam's children are -inf - x or NaN.
    return unpacked(packed(total.nan_to_num(DEAD, neginf=DEAD), child), width, keep)


def _remaining(
    trie: AnyTrie, nodes: Tensor, excluded: Tensor | None, allowed: Allowed | None
) -> Tensor:
    """A number that is positive where a node still has an allowed item. nodes [B, n].

    Raises ValueError if both filters are given: an excluded item may lie outside the allowed ones.
    """
    leaves = trie.leaves(nodes)
    if allowed is not None:
        if excluded is not None:
            raise ValueError(
                "excluded and allowed were both given; clear the excluded leaves' bits"
            )
        left = allowed.bits.within(trie.base_leaves(nodes))
        return left if allowed.added is None else left + listed(allowed.added, leaves)
    assert excluded is not None
    return (leaves.last - leaves.first) - listed(excluded, leaves)
