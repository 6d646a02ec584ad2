"""A trie with insertions against one that is built anew: its arrays, and the engine's answers."""

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.request import LikelihoodQuery, Prefix, SlateQuery
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.level_search import lay_out_reference
from recserve.kernels.trie.trie import build_trie
from recserve.models.inputs import NodeInputs
from recserve.search.filters import leaf_filter
from tests.support.leaf_counts import remaining
from tests.support.tries import SHAPES, Changed, engine_of


@pytest.fixture(params=SHAPES, ids=SHAPES.keys())
def changed(request):
    return Changed(*SHAPES[request.param])


def test_every_node_is_the_rebuilt_one(changed):
    trie, rebuilt, node = changed.trie, changed.rebuilt, changed.node
    assert sorted(node.tolist()) == list(range(trie.num_nodes))
    every = torch.arange(rebuilt.num_nodes)
    assert torch.equal(trie.codes_of(node), rebuilt.codes_of(every).long())
    assert torch.equal(trie.levels(node), rebuilt.levels(every))
    assert torch.equal(trie.parents_of(node), node[rebuilt.parents_of(every)])
    ranges = rebuilt.leaves(every)
    assert torch.equal(trie.leaves(node).first, ranges.first.long())
    assert torch.equal(trie.leaves(node).last, ranges.last.long())
    assert torch.equal(trie.num_children(node), rebuilt.num_children(every).long())
    assert trie.level_sizes == rebuilt.level_sizes
    assert trie.num_items == rebuilt.num_items and trie.num_rows == rebuilt.num_rows


def test_edges_that_pass_32_bits_find_their_nodes():
    """40,000 items under a codebook of 65,536: parent and code no longer fit into an int32."""
    draw = np.random.default_rng(0)
    codes = torch.from_numpy(np.unique(draw.integers(0, 65_536, (40_050, 2)), axis=0))
    codes = codes[torch.from_numpy(draw.permutation(len(codes)))]
    base, later = codes[:-50], codes[-50:]
    rows = torch.arange(len(base), len(codes))
    base_trie = build_trie(base, (65_536, 65_536))
    trie = insert_items(base_trie, later, rows, len(codes))
    rebuilt = build_trie(codes, (65_536, 65_536))
    assert base_trie.edges.dtype == torch.int64 and bool((base_trie.edges.diff() > 0).all())
    every = torch.arange(len(codes))
    assert torch.equal(trie.leaf_ranks(every), rebuilt.leaf_ranks(every).long())


def test_children_are_those_of_the_rebuilt_trie_old_ones_first(changed):
    trie, rebuilt, node = changed.trie, changed.rebuilt, changed.node
    mine, theirs = trie.children(node), rebuilt.children(torch.arange(rebuilt.num_nodes))
    assert mine.nodes.shape == theirs.nodes.shape
    for row in range(rebuilt.num_nodes):
        found = mine.nodes[row][mine.valid[row]]
        assert found.tolist() == sorted(node[theirs.nodes[row][theirs.valid[row]]].tolist())
        assert torch.equal(mine.codes[row][mine.valid[row]], trie.codes_of(found))
        columns = trie.child_columns(found, node[row].expand_as(found))
        assert columns.tolist() == list(range(found.shape[0]))
    assert torch.equal(trie.children(node, 300).valid.sum(1), mine.valid.sum(1))


def test_items_and_ranks_are_those_of_the_rebuilt_trie(changed):
    trie, rebuilt = changed.trie, changed.rebuilt
    assert torch.equal(trie.leaf_rows, rebuilt.leaf_rows.long())
    assert torch.equal(trie.leaf_ranks(changed.rows), rebuilt.leaf_ranks(changed.rows).long())
    leaves = trie.nodes_of_items(changed.rows)[:, -1]
    assert torch.equal(trie.items_of_leaves(leaves), changed.rows)
    ranks = sorted(rebuilt.leaf_ranks(torch.tensor(changed.hidden)).tolist()) or None
    assert (None if trie.removed_leaves is None else trie.removed_leaves.tolist()) == ranks


@pytest.mark.parametrize("bitmap", [False, True], ids=["list", "bitmap"])
def test_filters_count_what_is_left_at_every_node(changed, bitmap):
    draw = np.random.default_rng(3)
    excluded = draw.choice(changed.rows.numpy(), min(len(changed.rows), 20))
    allowed = draw.random(changed.num_rows) < 0.6 if bitmap else None
    items = AllowedItems.of(allowed) if bitmap else None
    found = leaf_filter(changed.trie, excluded, items)
    left = remaining(found, changed.trie, changed.node)
    banned = set(excluded.tolist()) | set(changed.hidden)
    rows, ranges = (
        changed.rebuilt.leaf_rows.tolist(),
        changed.rebuilt.leaves(torch.arange(changed.rebuilt.num_nodes)),
    )
    for number, (first, last) in enumerate(zip(ranges.first, ranges.last, strict=True)):
        under = [r for r in rows[first:last] if r not in banned and (not bitmap or allowed[r])]
        assert int(left[number]) == len(under)


def test_without_a_filter_only_hidden_items_are_left_out(changed):
    found = leaf_filter(changed.trie, None, None)
    assert (found is None) == (not changed.hidden)
    plain = insert_items(
        changed.base, changed.base_codes[:0], torch.arange(0), len(changed.base_codes)
    )
    assert leaf_filter(plain, None, None) is None
    assert plain.removed_leaves is None and plain.removed_rows is None


def test_token_trees_are_those_of_the_rebuilt_trie(changed):
    trie, rebuilt, node = changed.trie, changed.rebuilt, changed.node
    draw = np.random.default_rng(5)
    picked = torch.from_numpy(draw.choice(changed.rows.numpy(), (2, 6)))
    theirs, mine = [], []
    for owner, rows in enumerate(picked):
        nodes = rebuilt.nodes_of_items(rows).flatten()
        theirs.append(owner * rebuilt.num_nodes + nodes)
        mine.append(owner * trie.num_nodes + node[nodes])
    offsets, none = torch.arange(rebuilt.num_levels) * 1000, picked[0, :0]
    theirs = lay_out_reference(rebuilt, torch.cat(theirs), 2, offsets, none, none)
    mine = lay_out_reference(trie, torch.cat(mine), 2, offsets, none, none)
    expected, built = theirs.tree, mine.tree
    laid = theirs.query_keys // rebuilt.num_nodes * trie.num_nodes
    assert torch.equal(mine.query_keys, laid + node[theirs.query_keys % rebuilt.num_nodes])
    assert torch.equal(built.tokens, expected.tokens)
    for name in ("parents", "depths", "ends", "offsets"):
        assert torch.equal(getattr(built, name), getattr(expected, name)), name


def test_rows_outside_the_version_are_refused():
    changed = Changed(*SHAPES["narrow"])
    with pytest.raises(ValueError, match=f"the catalogue has {changed.num_rows}"):
        leaf_filter(changed.trie, np.array([changed.num_rows]), None)
    with pytest.raises(ValueError, match="allowed covers"):
        leaf_filter(changed.trie, None, AllowedItems.of(np.ones(changed.num_rows - 1, bool)))


@pytest.mark.parametrize("dense_weight", [0.0, 0.5], ids=["plain", "dense"])
@pytest.mark.parametrize("strategy", ["beam", "speculative"])
def test_slates_are_those_of_the_rebuilt_trie(changed, strategy, dense_weight):
    """Ids, order and scores; the rebuilt trie is told by a bitmap what the changed one hides."""
    model, engine = engine_of(changed)
    live = np.zeros(changed.num_rows, bool)
    live[changed.rows] = True
    live[changed.hidden] = False
    replaced = torch.from_numpy(np.setdiff1d(np.arange(changed.num_rows), changed.rows.numpy()))
    none = torch.zeros(0, len(changed.base.codebook_sizes), dtype=torch.int64)
    rebuilt = insert_items(changed.rebuilt, none, none[:, 0], changed.num_rows, replaced)
    assert (
        rebuilt.replaced_rows.tolist() == changed.trie.replaced_rows.tolist() == replaced.tolist()
    )
    draw = np.random.default_rng(7)
    asked, expected = [], []
    for width in (1, 4, 60):
        rows = torch.from_numpy(draw.choice(changed.rows.numpy(), 5))
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), rows + model.config.num_code_tokens])
        root = Prefix(NodeInputs(tokens), tokens.numpy())
        excluded = draw.choice(changed.rows.numpy(), 3)
        fields = {"k": width, "beam_width": width, "strategy": strategy, "excluded": excluded}
        fields["dense_weight"] = dense_weight
        asked.append(SlateQuery(prefix=root, trie=changed.trie, **fields))
        expected.append(
            SlateQuery(prefix=root, trie=rebuilt, allowed=AllowedItems.of(live), **fields)
        )
    for mine, theirs in zip(engine.run_many(asked), engine.run_many(expected), strict=True):
        assert mine.rows.tolist() == theirs.rows.tolist()
        assert live[mine.rows].all()
        torch.testing.assert_close(mine.scores, theirs.scores)


def test_likelihoods_are_those_of_the_rebuilt_trie(changed):
    model, engine = engine_of(changed)
    tokens = torch.tensor([0, *(changed.rows[:3] + model.config.num_code_tokens).tolist()])
    root = Prefix(NodeInputs(tokens), tokens.numpy())
    tries = (changed.trie, changed.rebuilt)
    mine, theirs = engine.run_many(
        [LikelihoodQuery(root, trie, changed.rows.numpy()) for trie in tries]
    )
    torch.testing.assert_close(mine.values, theirs.values)
