"""The token tree: preorder, ends, and what each constructor draws."""

import pytest
import torch

from recserve.kernels.tree import chain, from_parents, merge, root_branch


def test_ends_are_the_mask():
    """0 -+- 1 --- 3     preorder: 0 1 3 2, so nodes are renumbered 0 1 2 3.
    `- 2
    """
    tree = from_parents(torch.tensor([5, 6, 7, 8]), torch.tensor([-1, 0, 1, 0]))
    assert tree.ends.tolist() == [4, 3, 3, 4]
    assert tree.depths.tolist() == [0, 1, 2, 1]
    assert tree.dense_mask().int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 0, 0, 1],
    ]


def test_branches_do_not_see_each_other():
    tree = root_branch(torch.arange(5), torch.tensor([0, 2, 3, 5]))
    assert tree.parents.tolist() == [-1, 0, -1, -1, 3]
    assert tree.ends.tolist() == [2, 2, 3, 5, 5]


@pytest.mark.parametrize("offsets", [[0, 2, 2, 5], [0, 2, 4]])
def test_branch_offsets_are_checked(offsets):
    with pytest.raises(ValueError, match="branch"):
        root_branch(torch.arange(5), torch.tensor(offsets))


@pytest.mark.parametrize("parents", [[-1, 2, 1], [-1, 0, 0, 1], [0]])
def test_parents_out_of_preorder_are_refused(parents):
    with pytest.raises(ValueError, match="preced|preorder"):
        from_parents(torch.arange(len(parents)), torch.tensor(parents))


def test_merge_shifts_indices_and_keeps_trees_apart():
    tree = merge([chain(torch.arange(3)), root_branch(torch.arange(2), torch.tensor([0, 1, 2]))])
    assert tree.offsets.tolist() == [0, 3, 5]
    assert tree.parents.tolist() == [-1, 0, 1, -1, -1]
    assert tree.ends.tolist() == [3, 3, 3, 4, 5]
    assert not tree.dense_mask()[3:, :3].any()


def test_ancestors_nearest_first():
    tree = from_parents(torch.arange(4), torch.tensor([-1, 0, 1, 0]))
    assert tree.ancestors(2).tolist() == [[-1, -1], [0, -1], [1, 0], [0, -1]]
