"""Packed trees: their number, their owners, and the fields that only some of them have."""

from dataclasses import replace

import torch

from recserve.kernels.tree import AUXILIARY, CANDIDATE, chain, from_parents, merge, root_branch


def three():
    fork = from_parents(torch.arange(4), torch.tensor([-1, 0, 0, -1]))
    return [chain(torch.arange(3)), root_branch(torch.arange(2), torch.tensor([0, 1, 2])), fork]


def test_trees_are_counted_and_nodes_know_theirs():
    for count in (1, 2, 3):
        tree = merge(three()[:count])
        assert tree.num_trees == count
        nodes = sum(one.num_nodes for one in three()[:count])
        assert tree.num_nodes == tree.tree_ids().shape[0] == nodes
    assert tree.tree_ids().tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_a_field_that_one_tree_has_is_neutral_in_the_others():
    plain, branches, fork = three()
    kinds = torch.tensor([CANDIDATE, AUXILIARY, CANDIDATE, CANDIDATE])
    fork = replace(fork, kinds=kinds, prefix_limits=torch.arange(4), shared=torch.tensor([2]))
    tree = merge([plain, branches, fork])
    assert tree.kinds.tolist() == [CANDIDATE] * 5 + kinds.tolist()
    assert tree.prefix_limits.tolist() == [torch.iinfo(torch.int64).max] * 5 + [0, 1, 2, 3]
    assert tree.shared.tolist() == [0, 0, 2]
    for name in ("kinds", "prefix_limits", "shared"):
        assert getattr(merge(three()), name) is None


def test_shared_nodes_are_seen_by_their_tree_only():
    """The first two nodes of the last tree see each other, and all its nodes see them."""
    tree = merge([*three()[:2], replace(three()[2], shared=torch.tensor([2]))])
    mask = tree.dense_mask()
    assert mask[5:, 5:7].all() and not mask[:5, 5:].any() and not mask[5:, :5].any()
    assert mask[5:, 7:].int().tolist() == [[0, 0], [0, 0], [1, 0], [0, 1]]
