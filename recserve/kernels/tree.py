"""The token tree: draft tokens or ranking candidates that the target scores in one forward pass.

Nodes lie in depth-first preorder, so a subtree is a contiguous range. `ends[j]` is one past the
last node of j's subtree and encodes the whole mask: node i sees node j exactly when
`j <= i < ends[j]`.

    0 -+- 1 --- 2          index    0   1   2   3
       +- 3                parents -1   0   1   0
                           ends     4   3   3   4
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.kernels.host import on_device

CANDIDATE = 0
AUXILIARY = 1  # greater kinds are auxiliary too, with inputs that a drafter gives them


@dataclass(frozen=True)
class TokenTree:
    """B token trees, packed one after another.

    A tree may have several root nodes (depth 0, parent -1).

    Attributes:
        tokens: [T] token of each node.
        parents: [T] packed index of the parent, -1 for a root node.
        depths: [T] 0 for a root node. The position of a node is prefix length + depth.
        ends: [T] packed index one past the last node of the node's subtree.
        offsets: [B + 1]. Tree b holds the nodes `offsets[b] : offsets[b + 1]`.
        kinds: [T] CANDIDATE; nodes of all other kinds are scored and never accepted. None means all
            CANDIDATE.
        prefix_limits: [T] number of prefix tokens that the node may see. None means all of them.
        shared: [B] number of first nodes that every node of the tree sees. None means none.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ends: Tensor
    offsets: Tensor
    kinds: Tensor | None = None
    prefix_limits: Tensor | None = None
    shared: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """T, the number of nodes of all trees."""
        return self.tokens.shape[0]

    @property
    def num_trees(self) -> int:
        """B, the number of trees."""
        return self.offsets.shape[0] - 1

    def tree_ids(self) -> Tensor:
        """Returns the number [T] of the tree that each node belongs to."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=self.num_nodes)

    def dense_mask(self) -> Tensor:
        """Returns the mask [T, T] bool, true where row i sees column j.

        It is quadratic in T: for tests, training and small trees.
        """
        index = torch.arange(self.num_nodes, device=self.tokens.device)
        mask = (index[None, :] <= index[:, None]) & (index[:, None] < self.ends[None, :])
        if self.shared is not None:
            trees = self.tree_ids()
            is_shared = index - self.offsets[trees] < self.shared[trees]
            mask |= is_shared[None, :] & (trees[None, :] == trees[:, None])
        return mask

    def ancestors(self, max_depth: int) -> Tensor:
        """Returns indices [T, max_depth] of the proper ancestors, nearest first, padded with -1."""
        columns = []
        node = self.parents
        for _ in range(max_depth):
            columns.append(node)
            node = torch.where(node >= 0, self.parents[node.clamp(min=0)], -1)
        if not columns:
            return self.parents.new_empty(self.num_nodes, 0)
        return torch.stack(columns, dim=1)

    def to(self, device: torch.device | str) -> TokenTree:
        """Returns the same tree on another device."""
        columns = {
            name: value.to(device, non_blocking=not value.is_cuda)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **columns)


def chain(tokens: Tensor) -> TokenTree:
    """Returns one tree without forks, for a prefill or a linear draft:   0 -- 1 -- 2 -- 3.

    Args:
        tokens: [N]. Each node is the child of the one before it.
    """
    n = tokens.shape[0]
    index = torch.arange(n, device=tokens.device)
    ends = torch.full_like(index, n)
    offsets = on_device([0, n], tokens.device)
    return TokenTree(tokens, index - 1, index, ends, offsets)


def chains(count: int, size: int, device: torch.device) -> TokenTree:
    """Returns `count` trees without forks, of `size` nodes each. It only launches kernels.

    The tokens are the numbers of the nodes.
    """
    index = torch.arange(count * size, device=device)
    depths = index % size
    return TokenTree(
        tokens=index,
        parents=torch.where(depths > 0, index - 1, -1),
        depths=depths,
        ends=index - depths + size,
        offsets=torch.arange(0, count * size + 1, size, device=device),
    )


def root_branch(tokens: Tensor, branch_offsets: Tensor) -> TokenTree:
    """Returns one tree of isolated branches for a ranking call (MTGR's mask).

        0 -- 1        Each branch is a chain of its own.
        2 -- 3

    Args:
        tokens: [N].
        branch_offsets: [M + 1] starts of the branches, each at least one token long.

    Raises:
        ValueError: If a branch is empty or the offsets do not cover the tokens.
    """
    lengths = branch_offsets.diff()
    n = tokens.shape[0]
    if lengths.numel() and int(lengths.min()) < 1:
        raise ValueError("every branch needs at least one token; drop the empty candidates")
    if int(branch_offsets[-1]) != n:
        raise ValueError(f"branch_offsets end at {int(branch_offsets[-1])}, tokens hold {n}")
    index = torch.arange(n, device=tokens.device)
    starts = torch.repeat_interleave(branch_offsets[:-1], lengths, output_size=n)
    ends = torch.repeat_interleave(branch_offsets[1:], lengths, output_size=n)
    depths = index - starts
    parents = torch.where(depths > 0, index - 1, -1)
    return TokenTree(tokens, parents, depths, ends, on_device([0, n], tokens.device))


def from_parents(tokens: Tensor, parents: Tensor) -> TokenTree:
    """Returns one tree from parent indices that are already in preorder.

    Args:
        tokens: [N].
        parents: [N]. parents[i] < i, -1 for a root node.

    Raises:
        ValueError: If a parent does not precede its child or the order is not preorder.
    """
    n = tokens.shape[0]
    parent_list = parents.tolist()
    depths: list[int] = []
    ends = list(range(1, n + 1))
    open_path: list[int] = []
    for i, parent in enumerate(parent_list):
        if not -1 <= parent < i:
            raise ValueError(f"parents[{i}] is {parent}; a parent must precede its child")
        while open_path and open_path[-1] != parent:
            ends[open_path.pop()] = i
        if parent >= 0 and not open_path:
            raise ValueError(f"node {i} is not in preorder: its parent {parent} is already closed")
        depths.append(len(open_path))
        open_path.append(i)
    for node in open_path:
        ends[node] = n
    device = tokens.device
    return TokenTree(
        tokens,
        parents,
        on_device(depths, device, torch.int64),
        on_device(ends, device, torch.int64),
        on_device([0, n], device),
    )


def merge(trees: list[TokenTree]) -> TokenTree:
    """Packs several trees into one, in order.

    If only some trees have an optional field, the others get its neutral value: candidate, whole
    root, nothing shared.
    """
    if len(trees) == 1:
        return trees[0]
    shifts = [0]
    for tree in trees:
        shifts.append(shifts[-1] + tree.num_nodes)

    def pack(name: str, neutral: int, per_tree: bool = False) -> Tensor | None:
        if all(getattr(tree, name) is None for tree in trees):
            return None
        columns = []
        for tree in trees:
            column = getattr(tree, name)
            size = tree.num_trees if per_tree else tree.num_nodes
            columns.append(tree.tokens.new_full((size,), neutral) if column is None else column)
        return torch.cat(columns)

    pairs = list(zip(trees, shifts, strict=False))
    return TokenTree(
        torch.cat([t.tokens for t in trees]),
        torch.cat([torch.where(t.parents >= 0, t.parents + s, -1) for t, s in pairs]),
        torch.cat([t.depths for t in trees]),
        torch.cat([t.ends + s for t, s in pairs]),
        torch.cat([trees[0].offsets[:1], *(t.offsets[1:] + s for t, s in pairs)]),
        pack("kinds", CANDIDATE),
        pack("prefix_limits", torch.iinfo(torch.int64).max),
        pack("shared", 0, per_tree=True),
    )
