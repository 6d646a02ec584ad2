"""The trie's arrays against a plain dictionary of prefixes."""

import pytest
import torch

from recserve.kernels.tree import from_parents
from recserve.kernels.trie.level_search import lay_out_reference
from recserve.kernels.trie.trie import build_trie
from tests.support.grids import covering
from tests.support.tries import CATALOGUES, draw_codes


@pytest.mark.parametrize("codes", CATALOGUES.values(), ids=CATALOGUES.keys())
def test_children_and_leaf_ranges(codes):
    sizes = tuple(int(codes[:, level].max()) + 1 for level in range(codes.shape[1]))
    trie = build_trie(codes, sizes)
    rows = torch.arange(codes.shape[0])
    nodes = trie.nodes_of_items(rows)
    assert torch.equal(trie.node_codes[nodes].long(), codes)
    assert torch.equal(trie.items_of_leaves(nodes[:, -1]).long(), rows)
    for level in range(trie.num_levels):
        start, stop = trie.level_starts[level], trie.level_starts[level + 1]
        children = trie.children(torch.arange(start, stop))
        under: dict[tuple[int, ...], set[int]] = {}
        for row in codes.tolist():
            under.setdefault(tuple(row[:level]), set()).add(row[level])
        ordered = [under[p] for p in sorted(under)]
        assert [
            set(c[v].tolist()) for c, v in zip(children.codes, children.valid, strict=True)
        ] == ordered
        counts = (trie.last_leaf - trie.first_leaf)[start:stop].tolist()
        expected: dict[tuple[int, ...], int] = {}
        for row in codes.tolist():
            expected[tuple(row[:level])] = expected.get(tuple(row[:level]), 0) + 1
        assert counts == [expected[p] for p in sorted(expected)]


def test_shared_ids_and_wrong_codes_are_refused():
    with pytest.raises(ValueError, match="share a semantic id"):
        build_trie(torch.tensor([[1, 2], [1, 2]]), (3, 3))
    with pytest.raises(ValueError, match="span 0..5; the codebook holds 5"):
        build_trie(torch.tensor([[0], [5]]), (5,))
    with pytest.raises(ValueError, match="empty"):
        build_trie(torch.empty(0, 2, dtype=torch.long), (3, 3))


@pytest.mark.slow
def test_bytes_per_million_items():
    """Arrays only, counted: 100 MB per million items is the bound, four levels of 256."""
    codes = draw_codes(100_000, (256, 256, 256, 4))
    trie = build_trie(codes, (256, 256, 256, 4))
    held = sum(
        t.numel() * t.element_size() for t in vars(trie).values() if isinstance(t, torch.Tensor)
    )
    assert held / trie.num_items * 1e6 < 100e6


@pytest.mark.parametrize("codes, seed", covering(CATALOGUES, range(5)))
def test_trie_nodes_as_token_trees(codes, seed):
    """Sets of trie nodes of three requests: parents, ends and depths are those of
    `from_parents`.
    """
    g = torch.Generator().manual_seed(seed)
    sizes = tuple(int(codes[:, level].max()) + 1 for level in range(codes.shape[1]))
    trie = build_trie(codes, sizes)
    rows = torch.randint(0, codes.shape[0], (12,), generator=g)
    nodes = trie.nodes_of_items(rows)[:, : 1 + seed % trie.num_levels]
    owners = torch.tensor([0, 2]).repeat(6)
    keys = (owners[:, None] * trie.node_codes.shape[0] + nodes).flatten()
    offsets = torch.arange(trie.num_levels) * 1000
    trees = lay_out_reference(trie, keys, 3, offsets, keys[:0], keys[:0])
    tree, laid = trees.tree, trees.query_keys % trie.num_nodes
    assert torch.equal(trees.query_keys.sort().values, torch.unique(keys))
    assert torch.equal(tree.tokens, offsets[tree.depths] + trie.node_codes[laid])
    assert tree.offsets[1] == tree.offsets[2]
    for b in (0, 2):
        start, stop = int(tree.offsets[b]), int(tree.offsets[b + 1])
        parents = tree.parents[start:stop]
        again = from_parents(
            tree.tokens[start:stop], torch.where(parents >= 0, parents - start, -1)
        )
        assert torch.equal(again.ends + start, tree.ends[start:stop])
        assert torch.equal(again.depths, tree.depths[start:stop])
        inner = parents >= 0
        assert torch.equal(trie.parents[laid[start:stop][inner]].long(), laid[parents[inner]])
