"""Static trees: their order, their cuts, and the search against all trees there are."""

import random
from itertools import combinations

import pytest
import torch

from recserve.drafters.shared.rank_tree import (
    best_tree,
    expansion_tree,
    rank_tree,
)
from recserve.kernels.tree import from_parents
from recserve.speculation.draft import Budget
from tests.support.token_paths import mean_accept_length

CHOICES = [[0], [0, 0], [1], [0, 1], [2], [1, 0], [0, 0, 0], [0, 0, 1]]


def test_choices_in_any_order_are_one_tree_in_preorder():
    trees = set()
    for seed in range(5):
        shuffled = list(CHOICES)
        random.Random(seed).shuffle(shuffled)
        trees.add(rank_tree(shuffled))
    (tree,) = trees
    assert tree.paths[:4] == ((0,), (0, 0), (0, 0, 0), (0, 0, 1))
    assert tree.parents() == [-1, 0, 1, 1, 0, -1, 5, -1]
    assert tree.depth == 3 and tree.width == 3
    depths = from_parents(torch.zeros(8), torch.tensor(tree.parents())).depths
    assert (depths + 1).tolist() == [len(path) for path in tree.paths]


@pytest.mark.parametrize("tree", [rank_tree(CHOICES), expansion_tree((2, 1, 3)), rank_tree([])])
def test_levels_hold_every_node_below_its_parent(tree):
    inner = [-1]
    seen = []
    for level in tree.levels():
        for node, parent, rank in zip(level.nodes, level.parents, level.ranks, strict=True):
            assert tree.parents()[node] == inner[parent] and tree.paths[node][-1] == rank
        seen += level.nodes
        inner = [level.nodes[k] for k in level.inner]
        assert set(inner) == set(level.nodes) & set(tree.parents())
    assert sorted(seen) == list(range(len(tree)))


def test_expansions_multiply():
    assert len(expansion_tree((1, 1, 3, 1, 1))) == 1 + 1 + 3 + 3 + 3
    assert expansion_tree((2, 2)).paths == ((0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1))


def test_cuts_keep_the_budget_and_stay_trees():
    tree = expansion_tree((3, 2, 2))
    for nodes in range(0, 24):
        for depth in range(0, 5):
            cut = tree.within(Budget(nodes, depth))
            assert cut == rank_tree(cut.paths) and set(cut.paths) <= set(tree.paths)
            fitting = sum(len(path) <= depth for path in tree.paths)
            assert len(cut) == min(nodes, fitting) and cut.depth <= depth
    assert tree.within(Budget(3, 9)).paths == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize("seed", range(6))
def test_search_finds_the_best_of_all_trees(seed):
    rng = random.Random(seed)
    accuracies = [[rng.random() / 2 for _ in range(width)] for width in (3, 2, 2)]
    if seed == 0:
        accuracies = [[1.0, 0.0, 0.0], [1.0, 0.5], [1.0, 0.5]]
    every = expansion_tree((3, 2, 2)).paths
    for size in (1, 2, 4, 6):
        best = 0.0
        for paths in combinations(every, size):
            if all(path[:-1] in paths or len(path) == 1 for path in paths):
                best = max(best, mean_accept_length(rank_tree(paths), accuracies))
        found = best_tree(accuracies, size)
        assert len(found) == size
        assert mean_accept_length(found, accuracies) == pytest.approx(best, abs=1e-12)
    assert len(best_tree(accuracies, 1000)) == len(every)


@pytest.mark.parametrize(
    "paths,message",
    [([[]], "at least one rank"), ([[-1]], "each >= 0"), ([[0, 1]], "not its parent"),
     ([[0], [0]], "more than once")],
)  # fmt: skip
def test_what_is_no_tree_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        rank_tree(paths)


def test_other_wrong_numbers_are_refused():
    for widths in ((), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            expansion_tree(widths)
    for accuracies, nodes in (([], 3), ([[1.5]], 3), ([[0.5]], 0)):
        with pytest.raises(ValueError, match="between 0 and 1|at least 1"):
            best_tree(accuracies, nodes)
