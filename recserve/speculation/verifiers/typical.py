"""Typical acceptance: accepts tokens that the target finds plausible.

The rule is lossy: the text does not have the target's distribution. It accepts a child x of a node
if p(x) > min(epsilon, delta * exp(-H(p))). If the target is unsure (large entropy H), more tokens
are plausible. The longest accepted path wins; among equally long ones the likeliest.

Source: Medusa (arXiv 2401.10774, section 2.3.1); epsilon 0.09 and delta 0.3 are its defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recserve.kernels.acceptance.noise import gumbel
from recserve.kernels.tree import CANDIDATE
from recserve.speculation.verifier import Accepted, ScoredTrees, Verifier
from recserve.speculation.verifiers.path import path_to


@dataclass(frozen=True)
class TypicalRule(Verifier):
    """The lossy rule, for every kind of draft.

    Attributes:
        epsilon: Largest threshold for a plausible token's probability.
        delta: Factor of exp(-H(p)) in the threshold.
    """

    name = "typical"
    exact = False

    epsilon: float = 0.09
    delta: float = 0.3

    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the longest plausible path, and the target's own draw after it."""
        tree, owners = scored.tree, scored.tree.tree_ids()
        index = torch.arange(tree.num_nodes, device=owners.device)
        above = torch.where(tree.parents >= 0, tree.parents, index)
        log_p = scored.target(above).log_softmax(-1)
        # 0 * log 0 is 0.
        entropy = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(1)
        own = log_p.gather(1, tree.tokens[:, None])[:, 0]
        plausible = own.exp() > (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        if tree.kinds is not None:
            plausible &= tree.kinds == CANDIDATE
        is_root = tree.parents < 0
        plausible |= is_root
        score = torch.where(is_root, 0.0, own)
        # Each node walks up to node 0. A root is its own `above`, with score 0, so extra iterations
        # change nothing.
        total, accepted, node = score, plausible, above
        for _ in range(scored.depth):
            total = total + score[node]
            accepted = accepted & plausible[node]
            node = above[node]
        # Per tree: the greatest depth, then the highest total, then the first node.
        rank = torch.where(accepted, tree.depths, -1)
        longest = rank.new_zeros(tree.num_trees).scatter_reduce(0, owners, rank, "amax")
        total = total.masked_fill(rank != longest[owners], float("-inf"))
        best = total.new_full((tree.num_trees,), float("-inf"))
        best = best.scatter_reduce(0, owners, total, "amax")
        winner = torch.where(total == best[owners], index, tree.num_nodes)
        ends = index.new_full((tree.num_trees,), tree.num_nodes)
        ends = ends.scatter_reduce(0, owners, winner, "amin")
        logits = scored.target(ends)
        noise = gumbel(scored.seeds, scored.lengths + longest, scored.vocab_size)
        bonus = (logits + noise).argmax(-1)
        return Accepted(path_to(tree, ends, longest, scored.depth), longest, bonus)
