"""Beams of several requests at one level of the trie: the state that item decoding advances."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.core.sequence import Sequence
from recserve.kernels.trie.trie import Trie
from recserve.search.filters import RequestFilters
from recserve.search.scores import Scored


@dataclass(frozen=True)
class DenseCandidates:
    """The dense head's best items of B requests, which compete with the finished beams.

    Attributes:
        rows: [B, R] item rows, best first.
        valid: [B, R] bool, False for padding.
        dense: [B, I] log-probability of every item under the dense head.
        weights: [B, 1] weight of the dense head in each request.
        keys: [n] keys (as in `Scored`) of the prefixes that the target must score for the
            candidates. None: not known yet.
        log_probs: [B, R] log-probabilities of the semantic ids, -inf where not valid. None until
            the prefixes are scored.
    """

    rows: Tensor
    valid: Tensor
    dense: Tensor
    weights: Tensor
    keys: Tensor | None = None
    log_probs: Tensor | None = None

    def flat(self) -> tuple[Tensor, Tensor]:
        """Returns request number [n] and item row [n] of the valid candidates, row by row."""
        return self.valid.nonzero()[:, 0], self.rows[self.valid]

    def among(self, rows: Tensor) -> Tensor:
        """Returns [B, n] bool: which item rows [B, n] are dense candidates of their request."""
        same = rows[:, :, None] == self.rows[:, None, :]
        return (same & self.valid[:, None, :]).any(-1)

    @cached_property
    def scores(self) -> Tensor:
        """[B, R] final scores, -inf where not valid. Requires `log_probs`."""
        assert self.log_probs is not None, "the dense candidates are not scored"
        weighed = self.weights * self.dense.gather(1, self.rows)
        return (self.log_probs + weighed).masked_fill(~self.valid, float("-inf"))

    @cached_property
    def share(self) -> Tensor:
        """[B, 1] upper bound of what the dense head adds to the score of any other item.

        Candidates are the head's best items, so the bound is the weighted log-probability of the
        last one.
        """
        last = self.dense.gather(1, self.rows).masked_fill(~self.valid, float("inf"))
        return (self.weights * last.amin(1, True)).masked_fill(self.weights == 0, 0.0)


@dataclass(frozen=True)
class Beams:
    """B requests with W beams each; all beams are prefixes of the same length over one trie.

    Attributes:
        sequences: The requests.
        filters: Filter of each request.
        trie: Trie of the catalogue version.
        level: Length of the prefixes.
        nodes: [B, W] trie node of each prefix, any leaf where the beam is dead.
        log_probs: [B, W], -inf where the beam is dead.
        paths: [B, W, level] trie nodes on the way to each beam, the beam's own node last.
        last_hidden: [B, E] state of the last root token.
        scored: Prefixes that the target has scored.
        parents: [B, W] column of each beam's parent in the level above. None if that level is not
            the one directly above.
        dense_candidates: Items that compete with the finished beams. None: there are none.
        places: [B, 1] rank of the score that bounds each request (`bound_places`). None: no prefix
            is left out.
        missing: [n] keys of prefixes that the draft lacked, together with those of all prefixes
            above them. None: propose whatever the beams lack.
        repairs: Rounds that scored missing prefixes.
        flaws: [B] flaws of the states behind these beams (core/finite.py). None: all states are
            finite.
    """

    sequences: tuple[Sequence, ...]
    filters: RequestFilters
    trie: Trie
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
        """Returns beams at another level, with everything else unchanged."""
        return replace(
            self, level=level, nodes=nodes, log_probs=log_probs, paths=paths, parents=parents
        )

    def of_requests(self, part: slice) -> Beams:
        """Returns what a replayed search reads of some requests at level 0.

        Only `sequences`, `last_hidden`, `trie` and the rows of dense candidates are theirs.
        """
        dense = self.dense_candidates
        return replace(
            self,
            sequences=self.sequences[part],
            last_hidden=self.last_hidden[part],
            dense_candidates=None if dense is None else replace(dense, rows=dense.rows[part]),
        )

    def with_flaws(self, flaws: Tensor) -> Beams:
        """Returns the same beams with more flaws [B]."""
        return replace(self, flaws=flaws if self.flaws is None else self.flaws + flaws)

    def alive(self) -> Tensor:
        """Returns [B, W] bool: which beams are alive."""
        return self.log_probs > float("-inf")

    def keys(self, nodes: Tensor) -> Tensor:
        """Returns the keys (as in `Scored`) of trie nodes [B, ...], in the same shape."""
        owners = torch.arange(nodes.shape[0], device=nodes.device)
        owners = owners.view(-1, *[1] * (nodes.ndim - 1))
        return owners * self.trie.num_nodes + nodes

    def forked(self) -> Tensor:
        """Returns [B, W] bool: which beams are alive and have more than one child."""
        return self.alive() & (self.trie.num_children(self.nodes) > 1)

    @property
    def requests(self) -> list[SlateQuery]:
        """The query of each sequence."""
        return [r for r in (s.request for s in self.sequences) if isinstance(r, SlateQuery)]

    @property
    def widths(self) -> list[int]:
        """Beam width of each request."""
        return [request.width for request in self.requests]

    @property
    def finished(self) -> bool:
        """True when the beams are leaves.

        Dead beams also advance, because checking for them costs more.
        """
        return self.level == self.trie.num_levels
