"""What of a scored tree is accepted: walks from each tree's root node, and the plain torch twins.

Node 0 of a tree is the last committed token; a walk goes from it to the child that carries the
token drawn at the node, as far as there is one; the token drawn where it stops is the bonus. With
noise keyed by (seed, position) these are the tokens of undrafted decoding, at any temperature.
Sources: Leviathan et al. 2023, section 2.3; SpecInfer, arXiv 2305.09781, section 4.3 (several
children drawn from one distribution).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.noise import exponential, gumbel, step_keys, uniform
from recserve.kernels.tree import CANDIDATE, TokenTree


@dataclass(frozen=True)
class Keys:
    """What keys the noise of B trees: seeds [B] and the root lengths [B], both int64.

    A node's token has position root length + depth; the token drawn at it one more.
    """

    seeds: Tensor
    root_lengths: Tensor

    def positions(self, tree: TokenTree) -> Tensor:
        """[T] position of the token that is drawn at each node."""
        return self.root_lengths[tree.tree_ids()] + tree.depths + 1


@dataclass(frozen=True)
class DraftProbs:
    """q of T nodes: what their tokens were drawn from.

    values [R, V] float32, rows sum to 1. rows [T] int64: each node's row of them; -1 where the
    token was chosen, so that q is 1 at it. Rows of root nodes are not read.
    """

    values: Tensor
    rows: Tensor

    @classmethod
    def none(cls, tree: TokenTree, vocab_size: int) -> DraftProbs:
        """All tokens were chosen."""
        values = torch.empty(0, vocab_size, device=tree.tokens.device)
        return cls(values, torch.full_like(tree.tokens, -1))

    def at(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """[m, V] q of some nodes [m], which carry the tokens [m]."""
        values, rows = self.values, self.rows[nodes, None]
        sure = values.new_zeros(nodes.shape[0], values.shape[1]).scatter_(1, tokens[:, None], 1.0)
        if not values.shape[0]:
            return sure
        return torch.where(rows < 0, sure, values[rows[:, 0].clamp(min=0)])


@dataclass(frozen=True)
class Walk:
    """Accepted paths of B trees; shapes do not depend on what was accepted.

    nodes [B, D + 1]: packed indices of the root node and the accepted nodes, -1 behind the last.
    lengths [B]: accepted nodes, root node and bonus excluded. bonus [B]: token drawn at the last.
    """

    nodes: Tensor
    lengths: Tensor
    bonus: Tensor


def choose(logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor) -> Tensor:
    """[T] the token drawn at every node: argmax(logits / temperature + gumbel), lowest on ties.

    logits [T, V], any float dtype. temperatures [B] float32; 0 is the argmax of the logits.
    """
    trees = tree.tree_ids()
    warmth = temperatures[trees, None]
    noise = gumbel(keys.seeds[trees], keys.positions(tree), logits.shape[1])
    logits = logits.float()
    drawn = logits / torch.where(warmth > 0, warmth, 1.0) + noise
    return torch.where(warmth > 0, drawn, logits).argmax(-1)


def follow(chosen: Tensor, tree: TokenTree, max_depth: int) -> Walk:
    """Longest path on which every node carries the token drawn at its parent.

    chosen [T]. Of children with the same token the first is followed; auxiliary nodes never are.
    Every tree has one root node and at most max_depth levels below it. Shapes depend on T, B and
    max_depth alone.
    """
    size, node = tree.num_nodes, tree.offsets[:-1]
    if not max_depth:
        return Walk(node[:, None], torch.zeros_like(node), chosen[node])
    match = (tree.parents >= 0) & (tree.tokens == chosen[tree.parents.clamp(min=0)])
    if tree.kinds is not None:
        match &= tree.kinds == CANDIDATE
    # Where each node leads; `size` is the end of every path, and what leads nowhere is put behind.
    index = torch.arange(size, device=chosen.device)
    following = torch.full((size + 2,), size, dtype=torch.int64, device=chosen.device)
    following = following.scatter_reduce(
        0, torch.where(match, tree.parents, size + 1), index, "amin"
    )
    path = [node]
    for _ in range(max_depth):
        node = following[node]
        path.append(node)
    walked = torch.stack(path, dim=1)
    inside = walked < size
    lengths = inside.sum(1) - 1
    last = walked.gather(1, lengths[:, None])[:, 0]
    return Walk(torch.where(inside, walked, -1), lengths, chosen[last])


def accept(
    logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor, max_depth: int
) -> Walk:
    """Sample and walk; greedy where the temperature is 0. Exact for every draft that was chosen,
    not drawn. Arguments of `choose` and `follow`.
    """
    return follow(choose(logits, tree, keys, temperatures), tree, max_depth)


def accept_drawn(p: Tensor, q: DraftProbs, tree: TokenTree, keys: Keys, max_depth: int) -> Walk:
    """Rejection sampling for children that were drawn independently: a chain, or several.

    p [T, V] float32: target probabilities at each node, rows sum to 1. q: what each node's own
    token was drawn from. At a node the children are tried in order: accepted with
    probability min(1, p(x) / q(x)), else p becomes the normalised max(p - q, 0); with no child left
    the bonus is drawn from p. Coins and the bonus are keyed by the step: see `step_keys`. Shapes
    depend on T, B, V, R and max_depth alone.
    """
    index, owners = torch.arange(tree.num_nodes, device=p.device), tree.tree_ids()
    steps = step_keys(keys.root_lengths[owners] + 1, index - tree.offsets[owners])
    coins = uniform(keys.seeds[owners], steps, 1)[:, 0]
    here = tree.offsets[:-1].clone()
    nodes = torch.full((tree.num_trees, max_depth + 1), -1, dtype=torch.int64, device=p.device)
    lengths = torch.zeros_like(here)
    nodes[:, 0] = here
    left, totals = p[here], torch.ones_like(here, dtype=p.dtype)
    # In preorder a node's turn comes when the walk stands at its parent, or never.
    for number in range(tree.num_nodes):
        child, tree_id = index[number : number + 1], owners[number : number + 1]
        asked = tree.parents[child] == here[tree_id]
        if tree.kinds is not None:
            asked &= tree.kinds[child] == CANDIDATE
        token = tree.tokens[child]
        drawn, weight = q.at(child, token), left[tree_id] / totals[tree_id, None]
        share, level = drawn.gather(1, token[:, None])[:, 0], weight.gather(1, token[:, None])[:, 0]
        accepted = asked & (coins[child] * share < level)
        rest = (weight - drawn).clamp(min=0)
        total = rest.sum(1)
        # p and q equal but for rounding: a refusal says nothing about p.
        rest = torch.where(total[:, None] > 0, rest, p[here[tree_id]])
        total = torch.where(total > 0, total, 1.0)
        rest = torch.where(asked[:, None], rest, left[tree_id])
        total = torch.where(asked, total, totals[tree_id])
        left[tree_id] = torch.where(accepted[:, None], p[child], rest)
        totals[tree_id] = torch.where(accepted, 1.0, total)
        here[tree_id] = torch.where(accepted, child, here[tree_id])
        lengths[tree_id] += accepted.long()
        nodes[tree_id, lengths[tree_id]] = here[tree_id]
    waited = exponential(keys.seeds, step_keys(keys.root_lengths + 1, lengths * 0), p.shape[1])
    return Walk(nodes, lengths, (left / waited).argmax(-1))
