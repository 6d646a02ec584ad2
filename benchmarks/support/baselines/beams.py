"""One level of trie-constrained beam search over plain logits, for loops without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.trie.trie import Trie


@dataclass(frozen=True)
class Slates:
    """Best k items of each of B users. rows, scores [B, k], best first."""

    rows: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Level:
    """Beams after a level. nodes, scores, parents (beam of the level before), tokens: [B, W]."""

    nodes: Tensor
    scores: Tensor
    parents: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class BeamSearch:
    """What a level needs to know. offsets: first token of each level. normalise: softmax over the
    valid children, else over the vocabulary.
    """

    trie: Trie
    offsets: tuple[int, ...]
    width: int
    normalise: bool

    @property
    def levels(self) -> int:
        """L."""
        return self.trie.num_levels

    def first(self, logits: Tensor) -> Level:
        """From the root's logits [B, V]."""
        batch = logits.shape[0]
        nodes = torch.zeros(batch, 1, dtype=torch.int64)
        return self.next(Level(nodes, torch.zeros(batch, 1), nodes, nodes), logits, 0)

    def next(self, beams: Level, logits: Tensor, level: int) -> Level:
        """The best children of all beams. logits [B * W, V] of the beams' last tokens."""
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
        """Items of beams that are leaves."""
        leaves = beams.nodes.clamp(min=self.trie.level_starts[self.levels])
        return Slates(self.trie.items_of_leaves(leaves).long(), beams.scores)
