"""Beams of several requests at one level of the trie: the state that item decoding moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.core.sequence import Sequence
from recserve.kernels.trie.trie_view import TrieView
from recserve.search.filters import RequestFilters
from recserve.search.scores import Scored


@dataclass(frozen=True)
class DenseCandidates:
    """The dense head's best items of B requests, which compete with the finished beams.

    rows [B, R] item rows, best first, valid [B, R]. dense [B, I]: the head's log-probability of
    every item; weights [B, 1]: what it counts. keys [n]: the prefixes that the target must score
    for them, as in Scored; None: none. log_probs [B, R]: of their semantic ids, -inf where not
    valid; None until those prefixes are scored.
    """

    rows: Tensor
    valid: Tensor
    dense: Tensor
    weights: Tensor
    keys: Tensor | None = None
    log_probs: Tensor | None = None

    def flat(self) -> tuple[Tensor, Tensor]:
        """Returns request number [n] and item row [n] of the valid ones, in row-major order."""
        return self.valid.nonzero()[:, 0], self.rows[self.valid]

    def among(self, rows: Tensor) -> Tensor:
        """[B, n] bool: which of the item rows [B, n] are dense_candidates of their request."""
        same = rows[:, :, None] == self.rows[:, None, :]
        return (same & self.valid[:, None, :]).any(-1)

    @cached_property
    def scores(self) -> Tensor:
        """[B, R] final scores, -inf where not valid. Only once log_probs are known."""
        assert self.log_probs is not None, "the dense_candidates are not scored"
        weighed = self.weights * self.dense.gather(1, self.rows)
        return (self.log_probs + weighed).masked_fill(~self.valid, float("-inf"))

    @cached_property
    def share(self) -> Tensor:
        """[B, 1] what the dense head adds at most to the score of an item that is no dense
        candidate.
        """
        last = self.dense.gather(1, self.rows).masked_fill(~self.valid, float("inf"))
        return (self.weights * last.amin(1, True)).masked_fill(self.weights == 0, 0.0)


@dataclass(frozen=True)
class Beams:
    """B requests x W beams, all prefixes of the same length over the same trie.

    nodes [B, W]: trie node of each prefix, a leaf where dead. log_probs [B, W]: -inf where dead.
    paths [B, W, level]: trie node of each prefix of the prefix. last_hidden [B, E]: state of the
    last root token. parents [B, W]: each beam's parent, as a column of the level above; None where
    the beams came from further up. places [B, 1]: as in expansion.py; None: nothing is left out.
    missing [n]: keys of prefixes that a draft should have held, each with all above it; None:
    whatever the beams lack. repairs: rounds that scored such. flaws [B]: of the states that these
    beams come from, as in core/finite.py; None: all of them are finite.
    """

    sequences: tuple[Sequence, ...]
    filters: RequestFilters
    trie: TrieView
    level: int
    nodes: Tensor
    log_probs: Tensor
    paths: Tensor
    last_hidden: Tensor
    scored: Scored
    parents: Tensor | None = None
    dense_candidates: DenseCandidates | None = None
    places: Tensor | None = None
    missing: Tensor | None = None
    repairs: int = 0
    flaws: Tensor | None = None

    def at(
        self,
        level: int,
        nodes: Tensor,
        log_probs: Tensor,
        paths: Tensor,
        parents: Tensor | None = None,
    ) -> Beams:
        """The beams that these lead to."""
        return Beams(
            self.sequences,
            self.filters,
            self.trie,
            level,
            nodes,
            log_probs,
            paths,
            self.last_hidden,
            self.scored,
            parents,
            self.dense_candidates,
            self.places,
            self.missing,
            self.repairs,
            self.flaws,
        )

    def with_flaws(self, flaws: Tensor) -> Beams:
        """The same beams with more flaws [B]."""
        return replace(self, flaws=flaws if self.flaws is None else self.flaws + flaws)

    def alive(self) -> Tensor:
        """[B, W] bool."""
        return self.log_probs > float("-inf")

    def keys(self, nodes: Tensor) -> Tensor:
        """Keys as in Scored. nodes: [B, ...] trie nodes; same shape back."""
        owners = torch.arange(nodes.shape[0], device=nodes.device)
        owners = owners.view(-1, *[1] * (nodes.ndim - 1))
        return owners * self.trie.num_nodes + nodes

    def forked(self) -> Tensor:
        """[B, W] bool: alive and with more than one child."""
        return self.alive() & (self.trie.num_children(self.nodes) > 1)

    def open(self) -> Tensor:
        """[B, W] bool: alive and with more than one item below."""
        below = self.trie.leaves(self.nodes)
        return self.alive() & (below.last - below.first > 1)

    @property
    def requests(self) -> list[SlateQuery]:
        """What each sequence was asked."""
        return [r for r in (s.request for s in self.sequences) if isinstance(r, SlateQuery)]

    @property
    def widths(self) -> list[int]:
        """Beams that each request keeps."""
        return [request.width for request in self.requests]

    @property
    def finished(self) -> bool:
        """True when the beams are leaves: dead ones go on too, a look at them would cost more."""
        return self.level == self.trie.num_levels
