"""A draft that grows path by path: shared prefixes are one, in whatever order they come."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from recserve.kernels.tree import AUXILIARY, CANDIDATE
from recserve.speculation.drafters.host_draft import NOTHING, HostDraft

ROOT = -1


class DraftTree:
    """Nodes in the order they were added. Parents are such numbers too; ROOT is node 0 of the step.

    Candidate children of a node differ; auxiliary nodes are never merged with anything.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.kinds: list[int] = []
        self.proposers: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, parent: int, token: int) -> int | None:
        """The candidate child of `parent` that carries the token."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int, source: int = 0) -> int:
        """A candidate; the one that is there if there is one. source: who proposes it."""
        node = self.find(parent, token)
        if node is None:
            node = self._append(parent, token, CANDIDATE)
            self._children[parent, token] = node
        self.proposers[node] |= 1 << source
        return node

    def add_auxiliary(self, parent: int, token: int, source: int = 0) -> int:
        """A node that is scored and never accepted."""
        node = self._append(parent, token, AUXILIARY)
        self.proposers[node] |= 1 << source
        return node

    def add_path(self, tokens: Iterable[int], num_nodes: int) -> None:
        """Candidates below one another from the root, until the tree has `num_nodes`."""
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
        self.proposers.append(0)
        return len(self.tokens) - 1

    def preorder(self) -> list[int]:
        """Node numbers depth first, children in the order they were added."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node in reversed(range(len(self))):
            children[self.parents[node]].append(node)
        order: list[int] = []
        waiting = children[ROOT]
        while waiting:
            node = waiting.pop()
            order.append(node)
            waiting += children[node]
        return order

    def finish(self, order: list[int], name_proposers: bool = False) -> HostDraft:
        """The draft. order: of `preorder`. name_proposers: say which source proposed each node."""
        if not order:
            return NOTHING
        place = np.empty(len(order) + 1, np.int64)
        place[order] = np.arange(len(order))
        place[ROOT] = ROOT
        kinds = np.array(self.kinds)[order]
        return HostDraft(
            np.array(self.tokens, np.int64)[order],
            place[np.array(self.parents)[order]],
            max(self.depths),
            kinds if (kinds != CANDIDATE).any() else None,
            np.array(self.proposers)[order] if name_proposers else None,
        )
