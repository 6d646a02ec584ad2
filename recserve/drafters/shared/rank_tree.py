"""Static draft trees: the ranks of a drafter's guesses that are tried at each depth.

    paths (0,) (0, 0) (0, 1) (1,)      -+- best -+- best      of the next level
                                        |        `- second
                                        `- second

Sources: Medusa (arXiv 2401.10774), section 2.1 (choices) and appendix B (search); SpecInfer (arXiv
2305.09781), section 3 (expansions).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from recserve.speculation.draft import Budget

Path = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """Nodes of one depth, in preorder.

    Attributes:
        nodes: Number of each node in the tree.
        parents: Index of each node's parent among the inner nodes one level up; 0 at the first
            level, for the root.
        ranks: Rank of each node.
        inner: Indices, in this level, of the nodes that have children.
    """

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    inner: tuple[int, ...]


@dataclass(frozen=True)
class RankTree:
    """A static tree, given by the rank paths of its nodes.

    Attributes:
        paths: Paths of all nodes in preorder; every prefix of a path is also a path.
    """

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.paths)

    @cached_property
    def depth(self) -> int:
        """Most nodes on a path."""
        return max(map(len, self.paths), default=0)

    @cached_property
    def width(self) -> int:
        """Number of ranks that a level needs."""
        return 1 + max((path[-1] for path in self.paths), default=-1)

    @cached_property
    def num_parents(self) -> int:
        """Most nodes of one level that have children, and at least 1."""
        return max([1, *(len(level.inner) for level in self.levels())])

    def parents(self) -> list[int]:
        """Returns the number of each node's parent; -1 for children of the root."""
        number = {path: i for i, path in enumerate(self.paths)}
        return [number.get(path[:-1], -1) for path in self.paths]

    def levels(self) -> tuple[Level, ...]:
        """Returns the nodes by depth."""
        return _levels(self)

    def within(self, budget: Budget) -> RankTree:
        """Returns the part of the tree within the budget; small ranks at small depths come first.

        The selection depends on the shape alone, so drawn drafts stay correctly drawn.
        """
        if len(self) <= budget.num_nodes and self.depth <= budget.depth:
            return self
        # A budget deeper than the tree selects the same part, so that the cache holds it once.
        return _within(self, Budget(budget.num_nodes, min(budget.depth, self.depth)))


def rank_tree(paths: Iterable[Seq[int]]) -> RankTree:
    """Builds a tree from rank paths in any order, such as Medusa's choices.

    Raises:
        ValueError: If a path is empty, repeated, without its parent, or has a negative rank.
    """
    listed = [tuple(path) for path in paths]
    known = set(listed)
    for path in listed:
        if not path or min(path) < 0:
            raise ValueError(f"tree has the path {path}; it needs at least one rank, each >= 0")
        if path[:-1] and path[:-1] not in known:
            raise ValueError(f"tree has the path {path} but not its parent {path[:-1]}; add it")
    if len(known) < len(listed):
        twice = sorted({path for path in listed if listed.count(path) > 1})
        raise ValueError(f"tree has the paths {twice} more than once")
    return RankTree(tuple(sorted(listed)))


def expansion_tree(widths: Seq[int]) -> RankTree:
    """Builds the tree in which every node of level i has `widths[i]` children; all 1 is a chain.

    Raises:
        ValueError: If there is no width, or one below 1.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"expansion is {tuple(widths)}; it needs a width of at least 1 per level")
    paths = [
        path
        for depth in range(1, len(widths) + 1)
        for path in product(*(range(width) for width in widths[:depth]))
    ]
    return RankTree(tuple(sorted(paths)))


def best_tree(accuracies: Seq[Seq[float]], num_nodes: int) -> RankTree:
    """Builds the tree of `num_nodes` nodes with the largest mean accept length.

    Levels count as independent. A node's value is the product of the accuracies along its path, and
    the mean accept length is the sum of all values. Values fall along a path, so the nodes with the
    largest values form a tree.

    Args:
        accuracies: For each level, how often its guess of each rank is right, as measured.
        num_nodes: Number of nodes, at least 1.

    Raises:
        ValueError: If an accuracy is outside 0 to 1, or num_nodes is below 1.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes}; it must be at least 1")
    if not accuracies or any(not 0 <= value <= 1 for level in accuracies for value in level):
        raise ValueError("accuracies must be between 0 and 1, for at least one level")
    ranked = [
        sorted(((value, rank) for rank, value in enumerate(level)), key=lambda x: (-x[0], x[1]))
        for level in accuracies
    ]
    # Entries: the negative value, path of places in `ranked`, path of ranks, the parent's value.
    heap: list[tuple[float, Path, Path, float]] = [
        (-ranked[0][0][0], (0,), (ranked[0][0][1],), 1.0)
    ]
    paths: list[Path] = []
    while heap and len(paths) < num_nodes:
        negative, places, path, above = heapq.heappop(heap)
        paths.append(path)
        depth, place = len(path), places[-1] + 1
        if place < len(ranked[depth - 1]):
            value, rank = ranked[depth - 1][place]
            sibling = ((*places[:-1], place), (*path[:-1], rank))
            heapq.heappush(heap, (-above * value, sibling[0], sibling[1], above))
        if depth < len(ranked):
            value, rank = ranked[depth][0]
            child = ((*places, 0), (*path, rank))
            heapq.heappush(heap, (negative * value, child[0], child[1], -negative))
    return rank_tree(paths)


@lru_cache(maxsize=256)
def _within(tree: RankTree, budget: Budget) -> RankTree:
    fitting = [path for path in tree.paths if len(path) <= budget.depth]
    fitting.sort(key=lambda path: (len(path) + 2 * sum(path), path))
    return RankTree(tuple(sorted(fitting[: max(budget.num_nodes, 0)])))


@lru_cache(maxsize=256)
def _levels(tree: RankTree) -> tuple[Level, ...]:
    levels: list[Level] = []
    has_children = {path[:-1] for path in tree.paths}
    above: dict[Path, int] = {(): 0}
    for depth in range(1, tree.depth + 1):
        own = [(i, path) for i, path in enumerate(tree.paths) if len(path) == depth]
        inner = [k for k, (_, path) in enumerate(own) if path in has_children]
        levels.append(
            Level(
                tuple(i for i, _ in own),
                tuple(above[path[:-1]] for _, path in own),
                tuple(path[-1] for _, path in own),
                tuple(inner),
            )
        )
        above = {own[k][1]: place for place, k in enumerate(inner)}
    return tuple(levels)
