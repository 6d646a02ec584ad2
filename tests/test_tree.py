"""The token tree: preorder, ends, and what each constructor draws."""

import pytest
import torch

from recserve.kernels.tree import chain, from_parents, from_paths, merge, root_branch


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


@pytest.mark.parametrize("seed", range(40))
def test_paths_merge_like_a_set_of_prefixes(seed):
    g = torch.Generator().manual_seed(seed)
    rows, length = int(torch.randint(1, 60, (), generator=g)), 1 + seed % 5
    paths = torch.randint(0, 3, (rows, length), generator=g)
    owners = torch.randint(0, 4, (rows,), generator=g)
    built = from_paths(paths, owners, 4)
    prefixes = {
        (int(o), *p[: d + 1].tolist())
        for o, p in zip(owners, paths, strict=True)
        for d in range(length)
    }
    assert built.tree.num_nodes == len(prefixes)
    assert torch.equal(built.tree.tokens[built.nodes], paths)
    assert torch.equal(built.tree.tree_ids()[built.nodes], owners[:, None].expand(-1, length))
    for b in range(4):
        start, stop = int(built.tree.offsets[b]), int(built.tree.offsets[b + 1])
        parents = built.tree.parents[start:stop]
        parents = torch.where(parents >= 0, parents - start, -1)
        again = from_parents(built.tree.tokens[start:stop], parents)
        assert torch.equal(again.ends + start, built.tree.ends[start:stop])
        assert torch.equal(again.depths, built.tree.depths[start:stop])


def test_merge_shifts_indices_and_keeps_trees_apart():
    tree = merge([chain(torch.arange(3)), root_branch(torch.arange(2), torch.tensor([0, 1, 2]))])
    assert tree.offsets.tolist() == [0, 3, 5]
    assert tree.parents.tolist() == [-1, 0, 1, -1, -1]
    assert tree.ends.tolist() == [3, 3, 3, 4, 5]
    assert not tree.dense_mask()[3:, :3].any()


def test_ancestors_nearest_first():
    tree = from_parents(torch.arange(4), torch.tensor([-1, 0, 1, 0]))
    assert tree.ancestors(2).tolist() == [[-1, -1], [0, -1], [1, 0], [0, -1]]
