"""One level of beam search in the trie: the best children of all beams, and filters over leaves.

A child's score and node number are packed into one integer that orders by higher score, then by
lower node. So one top-k without ties selects the children.
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
    """Allowed leaves of B requests as bits, with a count before every word.

    Two reads give the number of allowed leaves before any rank. 32 items take 8 bytes.

    Attributes:
        words: [B, I // 32 + 1] int32 bits.
        counts: [B, I // 32 + 1] int32 set bits before each word.
    """

    words: Tensor
    counts: Tensor

    def before(self, ranks: Tensor) -> Tensor:
        """Returns the allowed leaves before each rank, int32. ranks: [B, n] in 0 : I + 1."""
        place = (ranks >> 5).long()
        words = self.words.gather(1, place) & ((1 << (ranks & 31).int()) - 1)
        return self.counts.gather(1, place) + popcount(words)

    def within(self, leaves: Leaves) -> Tensor:
        """Returns the allowed leaves [B, n] int32 in each range. leaves: [B, n]."""
        return self.before(leaves.last) - self.before(leaves.first)


@dataclass(frozen=True)
class Allowed:
    """Leaves that B requests allow.

    Attributes:
        bits: Leaves of the base.
        added: [B, A] ascending ranks of later leaves, padded with the number of items or more. None
            means that there are none.
    """

    bits: LeafBits
    added: Tensor | None = None


@dataclass(frozen=True)
class ChildFilter:
    """The leaves that B requests allow: all of them, or as one of the two fields says.

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

        None means that every node has one.
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
    """Beams of one level of a trie, and the number of children to select.

    Attributes:
        nodes: [B, W] trie nodes of the beams.
        log_probs: [B, W] float32 of the beams, -inf where a beam is dead.
        logits: [B * W, C] of the level's codes at each beam. A beam with one child may have any
            finite row.
        width: Most children of a node of this level (`Trie.widths`).
        keep: Children to select per request.
        normalizers: [B * W] subtracted from the logits. None means their log-sum-exp over the
            children of the beam, whether allowed or not.
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
    """Packs allowed leaves [B, I] bool, by leaf rank."""
    requests, items = allowed.shape
    padded = torch.zeros(requests, (items // 32 + 1) * 32, dtype=torch.bool, device=allowed.device)
    padded[:, :items] = allowed
    if allowed.device.type == "cpu":
        packed = np.packbits(padded.numpy(), axis=1, bitorder="little")
        return counted(torch.from_numpy(packed.view("<i4")))
    bits = padded.view(requests, -1, 32).int()
    return counted((bits << torch.arange(32, device=allowed.device)).sum(-1).int())


def counted(words: Tensor) -> LeafBits:
    """Adds the counts to words [B, n] int32."""
    counts = popcount(words)
    return LeafBits(words, counts.cumsum(-1, dtype=torch.int32) - counts)


def listed(ranks: Tensor, leaves: Leaves) -> Tensor:
    """Returns how many of the ascending ranks lie in each range.

    Args:
        ranks: [n], or [B, n].
        leaves: Ranges; as many rows as the ranks.
    """
    last = torch.searchsorted(ranks, leaves.last.contiguous())
    return last - torch.searchsorted(ranks, leaves.first.contiguous())


def popcount(words: Tensor) -> Tensor:
    """Returns the set bits of each int32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return (((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@dataclass(frozen=True)
class BestChildren:
    """Beams of the next level, in descending order. Missing ones have log_probs -inf and zeros.

    Attributes:
        nodes: [B, k].
        parents: [B, k] the beam that each child belongs to.
        log_probs: [B, k].
    """

    nodes: Tensor
    parents: Tensor
    log_probs: Tensor


def unpacked(keys: Tensor, width: int, keep: int) -> BestChildren:
    """Selects the best of packed children. keys: [B, W * width], width children per beam."""
    kept, index = keys.topk(min(keep, keys.shape[1]), dim=1)
    ordered = (kept >> 32).int()
    log_probs = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    alive = log_probs > DEAD
    nodes = torch.where(alive, LOW - (kept & LOW), 0)
    parents = torch.where(alive, index // width, 0)
    return BestChildren(nodes, parents, torch.where(alive, log_probs, DEAD))


def packed(log_probs: Tensor, nodes: Tensor) -> Tensor:
    """Returns int64 keys that order by log-probability, then by the lower node. Same shapes."""
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
    """Returns log-probabilities [n, m] of m children of each of n nodes.

    The result is undefined (a number or NaN) where a node is not a child of its parent.

    Args:
        trie: The catalogue's trie.
        parents: [n].
        nodes: [n, m].
        logits: [n, C], as in `ChildQuery`.
        width: As in `ChildQuery`.
        normalizers: [n], as in `ChildQuery`.
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
