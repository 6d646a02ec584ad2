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
from recserve.kernels.trie.trie_view import TrieView

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


@dataclass(frozen=True)
class ChildFilter:
    """Which leaves B requests allow: all of them, or what one of the two fields says.

    Attributes:
        excluded: [B, X] int, ascending leaf ranks that are not allowed, padded with the number of
            items or more.
        allowed: Leaves that are allowed. The excluded leaves have no bits there.

    Raises:
        ValueError: If both fields are given.
    """

    excluded: Tensor | None = None
    allowed: Allowed | None = None

    def __post_init__(self) -> None:
        if self.excluded is not None and self.allowed is not None:
            raise ValueError(
                "excluded and allowed were both given; clear the excluded leaves' bits"
            )

    def remaining(self, trie: TrieView, nodes: Tensor) -> Tensor | None:
        """Returns a number that is positive where a node [B, n] has an allowed leaf.

        None: every node has one.
        """
        if self.excluded is not None:
            leaves = trie.leaves(nodes)
            return (leaves.last - leaves.first) - listed(self.excluded, leaves)
        if self.allowed is None:
            return None
        left = self.allowed.bits.within(trie.base_leaves(nodes))
        added = self.allowed.added
        return left if added is None else left + listed(added, trie.leaves(nodes))


EVERYTHING = ChildFilter()


@dataclass(frozen=True)
class ChildQuery:
    """Beams of one level of a trie, and how many of their children are wanted.

    Attributes:
        nodes: [B, W] trie nodes of the beams.
        log_probs: [B, W] float32 of the beams, -inf where a beam is dead.
        logits: [B * W, C] of the level's codes at each beam. A beam with one child may have any
            finite row.
        width: Most children of a node of this level (`Trie.widths`).
        keep: Children wanted of each request.
        normalizers: [B * W] subtracted from the logits. None: their log-sum-exp over the children
            of the beam, whether allowed or not.
        filters: Leaves that the requests allow.
    """

    nodes: Tensor
    log_probs: Tensor
    logits: Tensor
    width: int
    keep: int
    normalizers: Tensor | None = None
    filters: ChildFilter = EVERYTHING


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
    trie: TrieView,
    parents: Tensor,
    nodes: Tensor,
    logits: Tensor,
    width: int,
    normalizers: Tensor | None = None,
) -> Tensor:
    """[n, m] log-probabilities of m children of each of n nodes; some number or NaN where it is
    none of its children.

    parents [n], nodes [n, m]. logits [n, C], width, normalizers [n]: as in `ChildQuery`.
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


def best_children(trie: TrieView, query: ChildQuery) -> BestChildren:
    """Returns the `keep` best children of every request that have an allowed leaf."""
    nodes, width = query.nodes, query.width
    batch = nodes.shape[0]
    children = trie.children(nodes.flatten(), width)
    gain = query.logits.float().gather(1, children.codes.long())
    if query.normalizers is None:
        gain = gain.masked_fill(~children.valid, DEAD).log_softmax(-1)
    else:
        gain = gain - query.normalizers[:, None]
    total = (query.log_probs.flatten()[:, None] + gain).masked_fill(~children.valid, DEAD)
    total, child = total.view(batch, -1), children.nodes.view(batch, -1)
    left = query.filters.remaining(trie, child)
    if left is not None:
        total = total.masked_fill(left <= 0, DEAD)
    # A dead beam's children are -inf - x or NaN.
    return unpacked(packed(total.nan_to_num(DEAD, neginf=DEAD), child), width, query.keep)
