"""The overlay against a trie that is built anew: its arrays, and the answers of the engine."""

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.request import LikelihoodQuery, Prefix, SlateQuery
from recserve.kernels.trie.trie import build_trie
from recserve.kernels.trie.trie_insertion import overlay_trie
from recserve.kernels.trie.trie_tree import tree_of_nodes
from recserve.models.inputs import NodeInputs
from recserve.search.filters import leaf_filter
from tests.support.leaf_counts import remaining
from tests.support.tries import SHAPES, Changed, engine_of


@pytest.fixture(params=SHAPES, ids=SHAPES.keys())
def changed(request):
    return Changed(*SHAPES[request.param])


def test_every_node_is_the_rebuilt_one(changed):
    overlay, rebuilt, node = changed.overlay, changed.rebuilt, changed.node
    assert sorted(node.tolist()) == list(range(overlay.num_nodes))
    every = torch.arange(rebuilt.num_nodes)
    assert torch.equal(overlay.codes_of(node), rebuilt.codes_of(every).long())
    assert torch.equal(overlay.levels(node), rebuilt.levels(every))
    assert torch.equal(overlay.parents_of(node), node[rebuilt.parents_of(every)])
    ranges = rebuilt.leaves(every)
    assert torch.equal(overlay.leaves(node).first, ranges.first.long())
    assert torch.equal(overlay.leaves(node).last, ranges.last.long())
    assert torch.equal(overlay.num_children(node), rebuilt.num_children(every).long())
    assert overlay.level_sizes == rebuilt.level_sizes
    assert overlay.num_items == rebuilt.num_items and overlay.num_rows == rebuilt.num_rows


def test_edges_that_pass_32_bits_find_their_nodes():
    """40,000 items under a codebook of 65,536: parent and code no longer fit into an int32."""
    draw = np.random.default_rng(0)
    codes = torch.from_numpy(np.unique(draw.integers(0, 65_536, (40_050, 2)), axis=0))
    codes = codes[torch.from_numpy(draw.permutation(len(codes)))]
    base, later = codes[:-50], codes[-50:]
    rows = torch.arange(len(base), len(codes))
    trie = build_trie(base, (65_536, 65_536))
    overlay = overlay_trie(trie, later, rows, len(codes))
    rebuilt = build_trie(codes, (65_536, 65_536))
    assert trie.edges.dtype == torch.int64 and bool((trie.edges.diff() > 0).all())
    every = torch.arange(len(codes))
    assert torch.equal(overlay.leaf_ranks(every), rebuilt.leaf_ranks(every).long())


def test_children_are_those_of_the_rebuilt_trie_old_ones_first(changed):
    overlay, rebuilt, node = changed.overlay, changed.rebuilt, changed.node
    mine, theirs = overlay.children(node), rebuilt.children(torch.arange(rebuilt.num_nodes))
    assert mine.nodes.shape == theirs.nodes.shape
    for row in range(rebuilt.num_nodes):
        found = mine.nodes[row][mine.valid[row]]
        assert found.tolist() == sorted(node[theirs.nodes[row][theirs.valid[row]]].tolist())
        assert torch.equal(mine.codes[row][mine.valid[row]], overlay.codes_of(found))
        places = overlay.places(found, node[row].expand_as(found))
        assert places.tolist() == list(range(found.shape[0]))
    assert torch.equal(overlay.children(node, 300).valid.sum(1), mine.valid.sum(1))


def test_items_and_ranks_are_those_of_the_rebuilt_trie(changed):
    overlay, rebuilt = changed.overlay, changed.rebuilt
    assert torch.equal(overlay.leaf_rows, rebuilt.leaf_rows.long())
    assert torch.equal(overlay.leaf_ranks(changed.rows), rebuilt.leaf_ranks(changed.rows).long())
    leaves = overlay.nodes_of_items(changed.rows)[:, -1]
    assert torch.equal(overlay.items_of_leaves(leaves), changed.rows)
    ranks = sorted(rebuilt.leaf_ranks(torch.tensor(changed.hidden)).tolist()) or None
    assert (None if overlay.hidden is None else overlay.hidden.tolist()) == ranks


@pytest.mark.parametrize("bitmap", [False, True], ids=["list", "bitmap"])
def test_filters_count_what_is_left_at_every_node(changed, bitmap):
    draw = np.random.default_rng(3)
    excluded = draw.choice(changed.rows.numpy(), min(len(changed.rows), 20))
    allowed = draw.random(changed.num_rows) < 0.6 if bitmap else None
    items = AllowedItems.of(allowed) if bitmap else None
    found = leaf_filter(changed.overlay, excluded, items)
    left = remaining(found, changed.overlay, changed.node)
    banned = set(excluded.tolist()) | set(changed.hidden)
    rows, ranges = (
        changed.rebuilt.leaf_rows.tolist(),
        changed.rebuilt.leaves(torch.arange(changed.rebuilt.num_nodes)),
    )
    for number, (first, last) in enumerate(zip(ranges.first, ranges.last, strict=True)):
        under = [r for r in rows[first:last] if r not in banned and (not bitmap or allowed[r])]
        assert int(left[number]) == len(under)


def test_without_a_filter_only_hidden_items_are_left_out(changed):
    found = leaf_filter(changed.overlay, None, None)
    assert (found is None) == (not changed.hidden)
    plain = overlay_trie(
        changed.base, changed.base_codes[:0], torch.arange(0), len(changed.base_codes)
    )
    assert leaf_filter(plain, None, None) is None and plain.hidden is None and plain.gone is None


def test_token_trees_are_those_of_the_rebuilt_trie(changed):
    overlay, rebuilt, node = changed.overlay, changed.rebuilt, changed.node
    draw = np.random.default_rng(5)
    picked = torch.from_numpy(draw.choice(changed.rows.numpy(), (2, 6)))
    theirs, mine = [], []
    for owner, rows in enumerate(picked):
        nodes = rebuilt.nodes_of_items(rows).flatten()
        theirs.append(owner * rebuilt.num_nodes + nodes)
        mine.append(owner * overlay.num_nodes + node[nodes])
    expected = tree_of_nodes(rebuilt, torch.cat(theirs), 2).tree
    built = tree_of_nodes(overlay, torch.cat(mine), 2).tree
    assert torch.equal(built.tokens, node[expected.tokens])
    for name in ("parents", "depths", "ends", "offsets"):
        assert torch.equal(getattr(built, name), getattr(expected, name)), name


def test_rows_outside_the_version_are_refused():
    changed = Changed(*SHAPES["narrow"])
    with pytest.raises(ValueError, match=f"the catalogue has {changed.num_rows}"):
        leaf_filter(changed.overlay, np.array([changed.num_rows]), None)
    with pytest.raises(ValueError, match="allowed covers"):
        leaf_filter(changed.overlay, None, AllowedItems.of(np.ones(changed.num_rows - 1, bool)))


@pytest.mark.parametrize("dense_weight", [0.0, 0.5], ids=["plain", "dense"])
@pytest.mark.parametrize("strategy", ["beam", "speculative"])
def test_slates_are_those_of_the_rebuilt_trie(changed, strategy, dense_weight):
    """Ids, order and scores; the rebuilt trie is told by a bitmap what the overlay hides."""
    model, engine = engine_of(changed)
    live = np.zeros(changed.num_rows, bool)
    live[changed.rows] = True
    live[changed.hidden] = False
    replaced = torch.from_numpy(np.setdiff1d(np.arange(changed.num_rows), changed.rows.numpy()))
    none = torch.zeros(0, len(changed.base.codebook_sizes), dtype=torch.int64)
    rebuilt = overlay_trie(changed.rebuilt, none, none[:, 0], changed.num_rows, replaced)
    assert rebuilt.replaced.tolist() == changed.overlay.replaced.tolist() == replaced.tolist()
    draw = np.random.default_rng(7)
    asked, expected = [], []
    for width in (1, 4, 60):
        rows = torch.from_numpy(draw.choice(changed.rows.numpy(), 5))
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), rows + model.config.num_code_tokens])
        root = Prefix(NodeInputs(tokens), tokens.numpy())
        excluded = draw.choice(changed.rows.numpy(), 3)
        fields = {"k": width, "beam_width": width, "strategy": strategy, "excluded": excluded}
        fields["dense_weight"] = dense_weight
        asked.append(SlateQuery(root, changed.overlay, **fields))
        expected.append(SlateQuery(root, rebuilt, allowed=AllowedItems.of(live), **fields))
    for mine, theirs in zip(engine.run_many(asked), engine.run_many(expected), strict=True):
        assert mine.rows.tolist() == theirs.rows.tolist()
        assert live[mine.rows].all()
        torch.testing.assert_close(mine.scores, theirs.scores)


def test_likelihoods_are_those_of_the_rebuilt_trie(changed):
    model, engine = engine_of(changed)
    tokens = torch.tensor([0, *(changed.rows[:3] + model.config.num_code_tokens).tolist()])
    root = Prefix(NodeInputs(tokens), tokens.numpy())
    tries = (changed.overlay, changed.rebuilt)
    mine, theirs = engine.run_many(
        [LikelihoodQuery(root, trie, changed.rows.numpy()) for trie in tries]
    )
    torch.testing.assert_close(mine.values, theirs.values)
