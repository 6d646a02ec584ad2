"""Block verification: accepts or rejects a chain as a whole, so a good end can save a weak middle.

With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), let S_i = sum_x max(P_i p(x) - q(x), 0)
after x_1 .. x_i. The threshold is h_i = S_i / (S_i + 1 - P_i), and h = P at the chain's end. The
path ends at the last i whose coin is below h_i. The next token is drawn from
norm(max(P_i p - q, 0)), and from p after the whole chain. In expectation the rule accepts at least
as many tokens as rejection sampling.

Source: Sun et al. 2024 (arXiv 2403.10444, algorithm 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.speculation.draft import TextDraft
from recserve.speculation.verifier import Accepted, ScoredTrees, Verifier
from recserve.speculation.verifiers.path import path_to
from recserve.speculation.verifiers.rejection import (
    coins,
    draft_probs,
    refuse_trees,
    residual_noise,
)


class BlockRule(Verifier):
    """The rule for chains, drawn with their distributions or chosen."""

    name = "block"
    only_chains = True
    reads_probs = True

    def check(self, draft: TextDraft) -> None:
        """Raises UnfitDraft if the draft has forks or auxiliary nodes."""
        refuse_trees("block", draft)

    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the longest prefix of each chain that the coins allow, and the token after it."""
        return accept_block(scored, coins(scored), residual_noise(scored))


def accept_block(scored: ScoredTrees, coins: Tensor, noise: Tensor) -> Accepted:
    """Accepts chains for given random numbers, without host synchronisation.

    Args:
        scored: B chains with T nodes in total.
        coins: [T] uniform numbers in [0, 1).
        noise: [B, V] Gumbel noise for the token after the path.
    """
    tree = scored.tree
    first, last = tree.offsets[:-1], tree.offsets[1:] - 1
    ends, lengths = first, torch.zeros_like(first)
    target = scored.target(first).softmax(-1)
    share = torch.ones_like(target[:, 0])
    after = _residual(scored, first, target, share)
    for depth in range(1, scored.depth + 1):
        # Past its own end a chain stays at its last node, and `inside` discards the results.
        inside, node = first + depth <= last, torch.minimum(first + depth, last)
        token = tree.tokens[node][:, None]
        ratio = target.gather(1, token) / draft_probs(scored, node).gather(1, token)
        share = torch.where(inside, (share * ratio[:, 0]).clamp(max=1), share)
        target = scored.target(node).softmax(-1)
        rest = _residual(scored, node, target, share)
        mass, missing = rest.sum(1), 1 - share
        level = torch.where(mass + missing > 0, mass / (mass + missing), 1.0)
        level = torch.where(node == last, share, level)
        accepted = inside & (coins[node] < level)
        ends, lengths = torch.where(accepted, node, ends), torch.where(accepted, depth, lengths)
        after = torch.where(accepted[:, None], rest, after)
    # At a chain's end, and if P p equals q, the next token comes from the target itself.
    whole = (ends == last) | (after.sum(1) <= 0)
    left = torch.where(whole[:, None], scored.target(ends).softmax(-1), after)
    bonus = (left.log() + noise).argmax(-1)
    return Accepted(path_to(tree, ends, lengths, scored.depth), lengths, bonus)


def _residual(scored: ScoredTrees, nodes: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """[m, V] max(P p - q, 0) with q of the next node; meaningless at a chain's end."""
    following = (nodes + 1).clamp(max=scored.tree.num_nodes - 1)
    return (share[:, None] * target - draft_probs(scored, following)).clamp(min=0)
