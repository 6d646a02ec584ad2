"""A draft that grows path by path. Equal prefixes share their nodes, in any order of insertion."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from recserve.kernels.tree import AUXILIARY, CANDIDATE
from recserve.speculation.draft import TextDraft, empty_draft

ROOT = -1


class DraftTree:
    """A tree whose nodes are numbered in the order of insertion.

    Parents are node numbers too; ROOT stands for node 0 of the step. Candidate children of a node
    have different tokens. Auxiliary nodes are never merged with other nodes.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.kinds: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, parent: int, token: int) -> int | None:
        """Returns the candidate child of `parent` that carries the token; None if there is none."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """Adds a candidate child, or finds the existing one.

        Args:
            parent: Node number or ROOT.
            token: Token of the child.

        Returns:
            Number of the child.
        """
        node = self.find(parent, token)
        if node is None:
            node = self._append(parent, token, CANDIDATE)
            self._children[parent, token] = node
        return node

    def add_auxiliary(self, parent: int, token: int, kind: int = AUXILIARY) -> int:
        """Adds a node that is scored but never accepted, and returns its number."""
        return self._append(parent, token, kind)

    def add_path(self, tokens: Iterable[int], num_nodes: int) -> None:
        """Adds candidates below one another from the root, until the tree has `num_nodes` nodes."""
        parent = ROOT
        for token in tokens:
            if len(self) >= num_nodes and self.find(parent, token) is None:
                return
            parent = self.add(parent, token)

    def _append(self, parent: int, token: int, kind: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.kinds.append(kind)
        return len(self.tokens) - 1

    def preorder(self) -> list[int]:
        """Returns node numbers depth first, children in the order of insertion."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        # `children[ROOT]` is the list's last entry, because ROOT is -1.
        for node in reversed(range(len(self))):
            children[self.parents[node]].append(node)
        order: list[int] = []
        waiting = children[ROOT]
        while waiting:
            node = waiting.pop()
            order.append(node)
            waiting += children[node]
        return order

    def finish(self, order: list[int]) -> TextDraft:
        """Returns the draft on the host.

        Args:
            order: Node numbers as `preorder` returns them.
        """
        if not order:
            return empty_draft()
        place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        kinds = [self.kinds[node] for node in order]
        auxiliary = any(kind != CANDIDATE for kind in kinds)
        candidates = [self.depths[node] for node in order if self.kinds[node] == CANDIDATE]
        return TextDraft(
            torch.tensor([self.tokens[node] for node in order]),
            torch.tensor([place[self.parents[node]] for node in order]),
            max(self.depths),
            kinds=torch.tensor(kinds) if auxiliary else None,
            candidate_depth=max(candidates, default=0),
        )
