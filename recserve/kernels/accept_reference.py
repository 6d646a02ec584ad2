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


def accept_drawn(p: Tensor, q: Tensor | None, tree: TokenTree, keys: Keys, max_depth: int) -> Walk:
    """Rejection sampling for children that were drawn independently: a chain, or several.

    p [T, V]: target probabilities at each node. q [T, V]: the distribution that each node's own
    token was drawn from (not read of root nodes); None: all tokens were chosen, q is 1 at them.
    Both float32, rows sum to 1. At a node the children are tried in order: accepted with
    probability min(1, p(x) / q(x)), else p becomes the normalised max(p - q, 0); with no child left
    the bonus is drawn from p. Coins and the bonus are keyed by the step: see `step_keys`.
    """
    tokens, ends = tree.tokens.tolist(), tree.ends.tolist()
    kinds = [CANDIDATE] * tree.num_nodes if tree.kinds is None else tree.kinds.tolist()
    owners = tree.tree_ids()
    numbers = torch.arange(tree.num_nodes, device=owners.device) - tree.offsets[owners]
    steps = step_keys(keys.root_lengths[owners] + 1, numbers)
    coins = uniform(keys.seeds[owners], steps, 1)[:, 0].cpu()
    paths, left = [], []
    for node in tree.offsets[:-1].tolist():
        path = [node]
        while path[-1] >= 0:
            node = path[-1]
            weight, total = p[node].cpu(), torch.ones(())
            accepted, child = -1, node + 1
            while child < ends[node] and accepted < 0:
                if kinds[child] == CANDIDATE:
                    x = tokens[child]
                    if q is None:
                        drawn = torch.zeros_like(weight).index_fill_(0, torch.tensor([x]), 1.0)
                    else:
                        drawn = q[child].cpu()
                    if coins[child] * drawn[x] < weight[x] / total:
                        accepted = child
                    else:
                        weight = (weight / total - drawn).clamp(min=0)
                        total = weight.sum()
                        if total <= 0:
                            # p and q equal but for rounding: a refusal says nothing about p.
                            weight, total = p[node].cpu(), torch.ones(())
                child = ends[child]
            path.append(accepted)
        paths.append(path[:-1] + [-1] * (max_depth + 2 - len(path)))
        left.append(weight)
    waited = exponential(keys.seeds, step_keys(keys.root_lengths + 1, keys.seeds * 0), p.shape[1])
    bonus = (torch.stack(left).to(p.device) / waited).argmax(-1)
    nodes = torch.tensor(paths, device=p.device)
    return Walk(nodes, (nodes[:, 1:] >= 0).sum(1), bonus)
