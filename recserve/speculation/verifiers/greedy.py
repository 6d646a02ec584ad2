"""Greedy acceptance: the path follows the argmax, and ends at the first one that no child carries.

Source: Leviathan et al. 2023 (arXiv 2211.17192), temperature 0.
"""

from __future__ import annotations

from torch import Tensor

from recserve.kernels.acceptance import acceptance
from recserve.kernels.acceptance.acceptance import largest
from recserve.speculation.verifier import Accepted, ScoredTrees, Verifier
from recserve.speculation.verifiers.path import follow


class GreedyRule(Verifier):
    """The rule of temperature 0, for every kind of draft."""

    name = "greedy"

    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the path of argmaxes, ties to the lowest token."""

        def draw(nodes: Tensor, trees: Tensor) -> Tensor:
            return largest(scored.target(nodes))

        if scored.logits is None:
            return follow(scored, draw)
        paths = acceptance.greedy_paths(scored.logits, scored.tree, scored.depth)
        return Accepted.unpack(paths, scored.depth)
