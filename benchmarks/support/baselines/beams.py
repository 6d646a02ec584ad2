"""One level of trie-constrained beam search over logits, for loops without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.trie.trie import Trie


@dataclass(frozen=True)
class Slates:
    """Best k items of each of B users; rows and scores are [B, k], best first."""

    rows: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Level:
    """Beams after a level; each tensor is [B, W].

    Attributes:
        nodes: Trie node of each beam.
        scores: Sum of log-probabilities.
        parents: Beam of the previous level.
        tokens: Last token of each beam.
    """

    nodes: Tensor
    scores: Tensor
    parents: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class BeamSearch:
    """Settings of the search.

    Attributes:
        trie: Trie of the semantic ids.
        offsets: First token of each level.
        width: Beam width.
        normalise: True normalises over the valid children, False over the vocabulary.
    """

    trie: Trie
    offsets: tuple[int, ...]
    width: int
    normalise: bool

    @property
    def levels(self) -> int:
        """Number L of levels."""
        return self.trie.num_levels

    def first(self, logits: Tensor) -> Level:
        """Returns the beams of level 0 from the prefix's logits [B, V]."""
        batch = logits.shape[0]
        nodes = torch.zeros(batch, 1, dtype=torch.int64)
        return self.next(Level(nodes, torch.zeros(batch, 1), nodes, nodes), logits, 0)

    def next(self, beams: Level, logits: Tensor, level: int) -> Level:
        """Returns the best children of all beams, from logits [B * W, V] of their last tokens."""
        batch, width = beams.nodes.shape
        children = self.trie.children(beams.nodes.flatten())
        tokens = children.codes.long() + self.offsets[level]
        if self.normalise:
            kept = logits.float().gather(1, tokens).masked_fill(~children.valid, float("-inf"))
            gain = kept.log_softmax(-1)
        else:
            gain = logits.float().log_softmax(-1).gather(1, tokens)
            gain = gain.masked_fill(~children.valid, float("-inf"))
        total = (beams.scores.flatten()[:, None] + gain).view(batch, -1)
        scores, index = total.topk(min(self.width, total.shape[1]), dim=1)
        dead = scores == float("-inf")
        return Level(
            children.nodes.view(batch, -1).gather(1, index).masked_fill(dead, 0),
            scores,
            index // (total.shape[1] // width),
            tokens.view(batch, -1).gather(1, index),
        )

    def slates(self, beams: Level) -> Slates:
        """Returns the items of beams that are leaves."""
        leaves = beams.nodes.clamp(min=self.trie.level_starts[self.levels])
        return Slates(self.trie.items_of_leaves(leaves).long(), beams.scores)
