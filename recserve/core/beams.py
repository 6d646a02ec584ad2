"""Beams of several requests at one level of the trie: the state that beam search moves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recserve.core.filtering import LeafFilter
from recserve.core.sequence import Sequence
from recserve.kernels.trie import Trie


@dataclass(frozen=True)
class Beams:
    """B requests x W beams, all prefixes of the same length over the same trie.

    nodes [B, W]: trie node of each prefix, 0 where dead. scores [B, W]: -inf where dead.
    paths [B, W, level]: trie node of each prefix of the prefix. slots [B, W, level]: pool slot of
    those already scored by the model, -1 of those it was not asked for.
    """

    sequences: tuple[Sequence, ...]
    filters: tuple[LeafFilter | None, ...]
    trie: Trie
    level: int
    nodes: Tensor
    scores: Tensor
    paths: Tensor
    slots: Tensor
    rounds: int = 0

    def alive(self) -> Tensor:
        """[B, W] bool."""
        return self.scores > float("-inf")

    @property
    def finished(self) -> bool:
        """True when the beams are leaves, or no request has one left."""
        return self.level == self.trie.num_levels or not bool(self.alive().any())
