"""Tree attention in C against the reference."""

from dataclasses import replace

import pytest
import torch

from recserve.kernels.attention import reference
from recserve.kernels.attention.native import NativeTreeAttention, supports_heads
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.native import native
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from tests.support.attention_batches import SHAPES, draw_batch, placed

TYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize(
    "kinds,prefixes,heads,kv_heads,dim",
    [
        *[shape for shape in SHAPES[:7] if shape[4] % native.LANES == 0],
        ([("chain", 1), ("tree", 2)], [64, 65], 1, 1, 16),
        ([("branches", 60)], [300], 8, 2, 80),
        ([("deep", 12)], [1000], 14, 2, 256),
        ([("chain", 300)], [70], 2, 1, 32),
        ([("tree", 150), ("chain", 2)], [40, 200], 6, 2, 48),
        ([("branches", 400)], [0], 2, 2, 32),
        ([("tree", 3)], [40], 200, 1, 16),
    ],
)
def test_attention_is_the_references(kinds, prefixes, heads, kv_heads, dim, cached, dtype):
    """Slots that belong to nobody hold NaN, which would spread."""
    for seed, layout in enumerate(("beside", "before", "pages")):
        batch, query, keys, values = draw_batch(
            kinds, prefixes, heads, kv_heads, dim, cached=cached, seed=seed
        )
        batch, keys, values = placed(batch, keys, values, layout)
        query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
        expected = reference.tree_attention(query.float(), keys.float(), values.float(), batch)
        foreign = torch.ones(keys.shape[0], dtype=torch.bool)
        foreign[torch.cat([*batch.prefixes, batch.slots])] = False
        keys[foreign] = values[foreign] = float("nan")
        got = NativeTreeAttention(batch)(query, query, query, keys, values)
        assert got.dtype == dtype
        near = 2e-6 if dtype == torch.float32 else 6e-3
        assert (got.float() - expected).norm() <= near * expected.norm()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("prefix", [0, 63, 90])
def test_a_node_has_the_same_bits_whatever_else_is_in_its_tree(prefix, group, dtype):
    """Among all nodes, as the end of a chain drafted alone, and as the one node under a prefix that
    its path has joined: plain decoding. Chains pass the end of a block of 32, rows the end of
    what attends at once.
    """
    batch, query, keys, values = draw_batch(
        [("tree", 140), ("deep", 30)], [prefix, 5], 2 * group, 2, 32, seed=2
    )
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)

    def attend(to, rows):
        return NativeTreeAttention(to)(rows, rows, rows, keys, values)

    whole = attend(batch, query)
    for node in (0, 7, 39, 139, 155, 169):
        path = [node]
        while int(batch.tree.parents[path[0]]) >= 0:
            path.insert(0, int(batch.tree.parents[path[0]]))
        base = batch.prefixes[int(node >= 140)]
        drafted = TreeBatch(
            chain(batch.tree.tokens[path]), None, batch.slots[path], Prefixes.of([base])
        )
        assert torch.equal(attend(drafted, query[path])[-1], whole[node])
        grown = torch.cat([base, batch.slots[path[:-1]]])
        plain = TreeBatch(
            chain(batch.tree.tokens[[node]]), None, batch.slots[[node]], Prefixes.of([grown])
        )
        assert torch.equal(attend(plain, query[[node]])[0], whole[node])
        only = TreeBatch(batch.tree, torch.tensor([node]), batch.slots, batch.prefixes)
        assert torch.equal(attend(only, query[[node]])[0], whole[node])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("limits", [False, True], ids=["whole-prefix", "prefix-limits"])
def test_a_candidate_has_the_same_bits_whoever_is_ranked_with_it(limits, dtype):
    """Alone, with 300 others, and beside another user's new history, whose first rows all see."""
    batch, query, keys, values = draw_batch(
        [("branches", 300), ("chain", 40)], [75, 0], 2, 2, 32, limits=limits
    )
    query, keys, values = (x.to(dtype) for x in (query, keys, values))
    silu, tree = Activation(32.0), batch.tree
    tree = replace(tree, ends=torch.cat([torch.arange(1, 301), torch.full((40,), 340)]))
    shared = replace(tree, shared=torch.tensor([0, 30]))
    if limits:
        full = tree.prefix_limits.masked_fill(tree.tree_ids() > 0, torch.iinfo(torch.int64).max)
        shared = replace(shared, prefix_limits=full)
    found = []
    for whole in (tree, shared):
        batch = replace(batch, tree=whole)
        found.append(NativeTreeAttention(batch, silu)(query, query, query, keys, values)[:300])
    assert torch.equal(*found)
    for node in (0, 7, 150, 299):
        one = chain(torch.zeros(1, dtype=torch.int64))
        if limits:
            one = replace(one, prefix_limits=tree.prefix_limits[[node]])
        alone = TreeBatch(one, None, batch.slots[[node]], Prefixes.of([batch.prefixes[0]]))
        row = query[[node]]
        got = NativeTreeAttention(alone, silu)(row, row, row, keys, values)
        assert torch.equal(got[0], found[0][node]), node


@pytest.mark.parametrize("activation", [SOFTMAX, Activation(32.0)], ids=["softmax", "silu"])
@pytest.mark.parametrize("limit", [1, 7, 8, 15, 16, 31, 32, 63, 64, 75])
def test_no_prefix_token_behind_the_limit_is_seen(limit, activation):
    """All rows have one limit: just below, at and above the ends of blocks of keys."""
    batch, query, keys, values = draw_batch([("branches", 9)], [75], 2, 2, 32)
    limits = torch.full((9,), limit)
    batch = replace(batch, tree=replace(batch.tree, prefix_limits=limits))
    got = NativeTreeAttention(batch, activation)(query, query, query, keys, values)
    expected = reference.tree_attention(query, keys, values, batch, activation)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_heads_that_c_does_not_attend_with():
    assert supports_heads(HeadLayout(2, 2, 64, torch.float32))
    for heads in (
        HeadLayout(2, 2, 60, torch.float32),
        HeadLayout(2, 2, 64, torch.float16),
        HeadLayout(1, 200, 1024, torch.float32),
        HeadLayout(2, 2, 64, torch.float32, fp8=True),
    ):
        assert not supports_heads(heads)
