"""Rejection sampling: accepts a drawn token with probability p / q, or draws from the residual.

Children of a node are tried in node order. After each rejection the target's distribution becomes
norm(max(p - q, 0)). With one child per node this is the rule of Leviathan et al. 2023 (arXiv
2211.17192, section 2.3) and Chen et al. 2023 (arXiv 2302.01318, algorithm 2). With several it is
SpecInfer's multi-step speculative sampling (arXiv 2305.09781, algorithm 2), in multi_step.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.acceptance import acceptance
from recserve.kernels.acceptance.acceptance import DraftProbs, Keys
from recserve.kernels.acceptance.noise import ACCEPT, RESIDUAL, gumbel, step_keys, uniform
from recserve.speculation.draft import TextDraft
from recserve.speculation.verifier import Accepted, ScoredTrees, UnfitDraft, Verifier
from recserve.speculation.verifiers.path import first_children


class RejectionRule(Verifier):
    """The rule for chains of drawn or chosen tokens. For a chosen token, q is 1 at the token."""

    name = "rejection"
    only_chains = True
    reads_probs = True

    def check(self, draft: TextDraft) -> None:
        """Raises UnfitDraft if the draft has forks or auxiliary nodes."""
        refuse_trees("rejection", draft)

    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the path until the first rejection, and the draw after it."""
        return verify_drawn(scored)


def verify_drawn(scored: ScoredTrees) -> Accepted:
    """Tries children in order, with the device's kernel if `scored.fixed_shapes`."""
    if not scored.fixed_shapes:
        return reject(scored, coins(scored), residual_noise(scored))
    tree = scored.tree
    p = scored.target(torch.arange(tree.num_nodes, device=tree.tokens.device)).softmax(-1).float()
    q = DraftProbs.none(tree, scored.vocab_size) if scored.probs is None else scored.probs
    keys = Keys(scored.seeds, scored.lengths - 1)
    walk = acceptance.accept_drawn(p, q, tree, keys, scored.depth)
    return Accepted(walk.nodes, walk.lengths, walk.bonus)


def reject(scored: ScoredTrees, coins: Tensor, noise: Tensor) -> Accepted:
    """Tries children in order until no untried child remains.

    Args:
        scored: B scored trees with T nodes.
        coins: [T] uniform numbers in [0, 1).
        noise: [B, V] Gumbel noise for the token after the path.
    """
    tree, owners = scored.tree, scored.tree.tree_ids()
    index = torch.arange(tree.num_nodes, device=owners.device)
    here = tree.offsets[:-1].clone()
    tried = here.clone()
    nodes = torch.full(
        (tree.num_trees, scored.depth + 1), -1, dtype=torch.int64, device=owners.device
    )
    nodes[:, 0] = here
    lengths = torch.zeros_like(here)
    target = scored.target(here).softmax(-1)
    while True:
        children = first_children(tree, here, index > tried[owners])
        rows = (children >= 0).nonzero()[:, 0]
        if not rows.shape[0]:
            break
        child = children[rows]
        tried[rows] = child
        token = tree.tokens[child][:, None]
        p, drafted = target[rows], draft_probs(scored, child)
        accepted = coins[child] * drafted.gather(1, token)[:, 0] < p.gather(1, token)[:, 0]
        rest = (p - drafted).clamp_(min=0)
        mass = rest.sum(1, keepdim=True)
        # If p equals q the residual is empty. A rejection is then a rounding error, and p itself is
        # the right distribution.
        target[rows] = torch.where(mass > 0, rest / mass, p)
        rows, child = rows[accepted], child[accepted]
        if rows.shape[0]:
            here[rows] = child
            lengths[rows] += 1
            nodes[rows, lengths[rows]] = child
            target[rows] = scored.target(child).softmax(-1)
    return Accepted(nodes, lengths, (target.log() + noise).argmax(-1))


def draft_probs(scored: ScoredTrees, nodes: Tensor) -> Tensor:
    """Returns the distribution that each node's token was drawn from, for packed nodes [m].

    Returns:
        [m, V] probabilities; a chosen token has probability 1.
    """
    tree = scored.tree
    probs = DraftProbs.none(tree, scored.vocab_size) if scored.probs is None else scored.probs
    return probs.at(nodes, tree.tokens[nodes])


def coins(scored: ScoredTrees) -> Tensor:
    """Returns uniform numbers [T], one per node, that differ for every step."""
    owners = scored.tree.tree_ids()
    number = torch.arange(scored.tree.num_nodes, device=owners.device) - scored.tree.offsets[owners]
    keys = step_keys(scored.lengths[owners], number)
    return uniform(scored.seeds[owners], keys, 1, ACCEPT)[:, 0]


def residual_noise(scored: ScoredTrees) -> Tensor:
    """Returns Gumbel noise [B, V] that differs for every step."""
    keys = step_keys(scored.lengths, torch.zeros_like(scored.lengths))
    return gumbel(scored.seeds, keys, scored.vocab_size, RESIDUAL)


def refuse_trees(rule: str, draft: TextDraft) -> None:
    """Raises UnfitDraft unless the draft is a chain of candidates."""
    if not draft.is_chain or draft.kinds is not None:
        raise UnfitDraft(
            f"the rule {rule!r} needs a chain of candidate nodes; this draft has {len(draft)} "
            f"nodes on {draft.depth} levels; use 'sample' or 'multi_step'"
        )
