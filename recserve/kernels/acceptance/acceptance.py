"""Acceptance of drafted tokens: walks from each tree's root node.

Node 0 of a tree is the last committed token. A token is drawn at every node. The walk moves to the
child that carries the drawn token until no child does. The token drawn at the last node is the
bonus token. The noise is keyed by (seed, position), so the result equals decoding without drafts,
token for token, at any temperature.
Sources: Leviathan et al. 2023, section 2.3; SpecInfer, arXiv 2305.09781, section 4.3 (several
children drawn from one distribution).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.acceptance import native
from recserve.kernels.acceptance.noise import exponential, gumbel_reference, step_keys, uniform
from recserve.kernels.backend import Operator
from recserve.kernels.tree import CANDIDATE, TokenTree


@dataclass(frozen=True)
class Keys:
    """Keys of the noise of B trees.

    A node's own token has the position prefix length + depth. The token drawn at it has one more.

    Attributes:
        seeds: [B] int64 seed of each sequence.
        prefix_lengths: [B] int64 number of prefix tokens of each tree.
    """

    seeds: Tensor
    prefix_lengths: Tensor

    def positions(self, tree: TokenTree) -> Tensor:
        """Returns the position [T] of the token that is drawn at each node."""
        return self.prefix_lengths[tree.tree_ids()] + tree.depths + 1


@dataclass(frozen=True)
class DraftProbs:
    """Draft distributions q of T nodes: what their tokens were drawn from.

    Attributes:
        values: [R, V] float32. Each row sums to 1.
        rows: [T] int64, the row of `values` for each node. -1 marks a token that was chosen
            deterministically, so that q is 1 at this token. Rows of root nodes are not read.
    """

    values: Tensor
    rows: Tensor

    @classmethod
    def none(cls, tree: TokenTree, vocab_size: int) -> DraftProbs:
        """Returns the distributions of a tree whose tokens were all chosen deterministically."""
        values = torch.empty(0, vocab_size, device=tree.tokens.device)
        return cls(values, torch.full_like(tree.tokens, -1))

    def at(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Returns q [m, V] of nodes [m] that carry the tokens [m]."""
        values, rows = self.values, self.rows[nodes, None]
        sure = values.new_zeros(nodes.shape[0], values.shape[1]).scatter_(1, tokens[:, None], 1.0)
        if not values.shape[0]:
            return sure
        return torch.where(rows < 0, sure, values[rows[:, 0].clamp(min=0)])


@dataclass(frozen=True)
class Walk:
    """Accepted paths of B trees. The shapes do not depend on how much was accepted.

    Attributes:
        nodes: [B, D + 1] packed indices of the root node and the accepted nodes, padded with -1.
        lengths: [B] accepted nodes. The root node and the bonus token do not count.
        bonus: [B] token drawn at the last accepted node.
    """

    nodes: Tensor
    lengths: Tensor
    bonus: Tensor


def largest(rows: Tensor) -> Tensor:
    """Returns the index of each row's largest entry, the lowest index if entries are equal.

    On a CPU, numpy does the search, because it is several times faster than torch. bfloat16 values
    are compared by their bits.

    Args:
        rows: [m, V] any float dtype.

    Returns:
        [m] int64 indices.
    """
    if rows.is_cuda:
        return rows.argmax(-1)
    if rows.dtype == torch.bfloat16:
        bits = rows.view(torch.int16).numpy()
        places: list[int] = bits.argmax(-1).tolist()
        # Among positive numbers, larger values have larger bits. All others compare as smaller:
        # zero has no bits set, and the sign bit makes int16 negative.
        if all(bits.item(row, place) > 0 for row, place in enumerate(places)):
            return torch.tensor(places)
        rows = rows.float()
    return torch.from_numpy(rows.numpy().argmax(-1))


def choose(logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor) -> Tensor:
    """Draws a token at every node: argmax(logits / temperature + gumbel).

    Args:
        logits: [T, V] target logits, any float dtype.
        tree: B packed trees with T nodes.
        keys: Keys of the noise.
        temperatures: [B] float32. 0 selects the argmax of the logits.

    Returns:
        [T] int64 tokens. Ties resolve to the lowest token.
    """
    trees = tree.tree_ids()
    warmth = temperatures[trees, None]
    noise = gumbel_reference(keys.seeds[trees], keys.positions(tree), logits.shape[1])
    logits = logits.float()
    drawn = logits / torch.where(warmth > 0, warmth, 1.0) + noise
    return torch.where(warmth > 0, drawn, logits).argmax(-1)


def follow(chosen: Tensor, tree: TokenTree, max_depth: int) -> Walk:
    """Returns the longest path on which every node carries the token drawn at its parent.

    The first of several children with the same token is followed. Auxiliary nodes are never
    followed. Shapes depend on T, B and max_depth alone.

    Args:
        chosen: [T] token drawn at each node.
        tree: B packed trees. Each has one root node and at most max_depth levels below it.
        max_depth: D, the deepest level of any tree.
    """
    size, node = tree.num_nodes, tree.offsets[:-1]
    if not max_depth:
        return Walk(node[:, None], torch.zeros_like(node), chosen[node])
    match = (tree.parents >= 0) & (tree.tokens == chosen[tree.parents.clamp(min=0)])
    if tree.kinds is not None:
        match &= tree.kinds == CANDIDATE
    # The successor of each node. `size` ends every path. Nodes that match no parent scatter into
    # the unused place `size + 1`.
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


def accept_reference(
    logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor, max_depth: int
) -> Walk:
    """Draws a token at every node and walks; greedy where the temperature is 0.

    This is exact for drafts whose tokens were chosen, not drawn. The arguments are those of
    `choose` and `follow`.
    """
    return follow(choose(logits, tree, keys, temperatures), tree, max_depth)


def accept_drawn_reference(
    p: Tensor, q: DraftProbs, tree: TokenTree, keys: Keys, max_depth: int
) -> Walk:
    """Rejection sampling for children that were drawn independently: a chain, or several children.

    The children of a node are tried in order. A child x is accepted with probability
    min(1, p(x) / q(x)). A rejection replaces p by the normalised max(p - q, 0). The bonus token is
    drawn from p when no child is left. Acceptance noise and bonus noise are keyed by the step; see
    `step_keys`. Shapes depend on T, B, V, R and max_depth alone.

    Args:
        p: [T, V] float32 target probabilities at each node. Each row sums to 1.
        q: The distributions that the nodes' own tokens were drawn from.
        tree: B packed trees.
        keys: Keys of the noise.
        max_depth: D, the deepest level of any tree.

    Source: Leviathan et al. 2023, section 2.3; SpecInfer, arXiv 2305.09781, section 4.3.
    """
    index, owners = torch.arange(tree.num_nodes, device=p.device), tree.tree_ids()
    steps = step_keys(keys.prefix_lengths[owners] + 1, index - tree.offsets[owners])
    coins = uniform(keys.seeds[owners], steps, 1)[:, 0]
    here = tree.offsets[:-1].clone()
    nodes = torch.full((tree.num_trees, max_depth + 1), -1, dtype=torch.int64, device=p.device)
    lengths = torch.zeros_like(here)
    nodes[:, 0] = here
    left, totals = p[here], torch.ones_like(here, dtype=p.dtype)
    # Nodes lie in preorder. So when a node is tried, the walk stands at its parent or never will.
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
        # p and q are equal except for rounding, so a rejection says nothing about p.
        rest = torch.where(total[:, None] > 0, rest, p[here[tree_id]])
        total = torch.where(total > 0, total, 1.0)
        rest = torch.where(asked[:, None], rest, left[tree_id])
        total = torch.where(asked, total, totals[tree_id])
        left[tree_id] = torch.where(accepted[:, None], p[child], rest)
        totals[tree_id] = torch.where(accepted, 1.0, total)
        here[tree_id] = torch.where(accepted, child, here[tree_id])
        lengths[tree_id] += accepted.long()
        nodes[tree_id, lengths[tree_id]] = here[tree_id]
    waited = exponential(keys.seeds, step_keys(keys.prefix_lengths + 1, lengths * 0), p.shape[1])
    return Walk(nodes, lengths, (left / waited).argmax(-1))


def pack_paths(walk: Walk, tree: TokenTree, logits: Tensor) -> Tensor:
    """Returns paths in one tensor, so that one copy brings them to the host.

    Args:
        walk: Paths of B trees.
        tree: The trees.
        logits: [T, V] raw logits.

    Returns:
        [B, 2 D + 5] int64. Columns of a tree, in order:
        - D + 1 accepted packed nodes: node 0 first, -1 after the last.
        - The number of accepted nodes, without node 0.
        - The bonus token.
        - D + 1 tokens of the accepted nodes. Values after the last have no meaning.
        - 1 if logits of the path's nodes are not finite, else 0.
    """
    nodes = walk.nodes.clamp(min=0)
    # amax of a row with NaN is NaN.
    fits = torch.isfinite(logits.amax(1))[nodes] | (walk.nodes < 0)
    flawed = ~fits.all(1, keepdim=True)
    found = [walk.nodes, walk.lengths[:, None], walk.bonus[:, None]]
    return torch.cat([*found, tree.tokens[nodes], flawed.long()], 1)


def greedy_paths_reference(logits: Tensor, tree: TokenTree, max_depth: int) -> Tensor:
    """Follows the argmax of every node, and returns [B, 2 D + 5] paths as `pack_paths` does.

    Args:
        logits: [T, V] raw logits, any float dtype. Ties resolve to the lowest token.
        tree: B packed trees.
        max_depth: D, the deepest level of any tree.
    """
    return pack_paths(follow(largest(logits), tree, max_depth), tree, logits)


TRITON = "recserve.kernels.acceptance"
greedy_paths = Operator(greedy_paths_reference, native.greedy_paths)
accept = Operator(accept_reference, triton=f"{TRITON}.triton_accept:accept")
accept_drawn = Operator(accept_drawn_reference, triton=f"{TRITON}.triton_accept_drawn:accept_drawn")
