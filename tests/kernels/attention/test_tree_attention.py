"""Both CPU paths against the plain reference, over drawn trees, prefixes and head layouts."""

from dataclasses import replace

import pytest
import torch

from recserve.kernels.attention import cpu, reference
from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.attention.cpu import CpuTreeAttention
from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.native import native
from recserve.kernels.tree import chain, root_branch
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from tests.support.attention_batches import SHAPES, as_table, draw_batch, draw_tree, placed
from tests.support.grids import covering


def in_torch(batch, query, keys, values, activation=SOFTMAX):
    attention = CpuTreeAttention(batch, HeadLayout.of(query, keys), activation)
    return attention(query, query, query, keys, values)


def same(batch, query, keys, values, activation):
    expected = reference.tree_attention(query, keys, values, batch, activation)
    chosen = tree_attention(batch, HeadLayout.of(query, keys), activation)
    whole = keys.shape[2] % native.LANES == 0 and backend_of(batch.slots) is Backend.C
    assert isinstance(chosen, NativeTreeAttention if whole else CpuTreeAttention)
    for got in (
        in_torch(batch, query, keys, values, activation),
        chosen(query, query, query, keys, values),
    ):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("limits", [False, True], ids=["whole-prefix", "prefix-limits"])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,prefixes,heads,kv_heads,dim", SHAPES)
def test_softmax_matches_reference(kinds, prefixes, heads, kv_heads, dim, cached, limits):
    for seed in range(3):
        drawn = draw_batch(
            kinds, prefixes, heads, kv_heads, dim, cached=cached, limits=limits, seed=seed
        )
        same(*drawn, SOFTMAX)


@pytest.mark.parametrize("limits", [False, True], ids=["whole-prefix", "prefix-limits"])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,prefixes,heads,kv_heads,dim", [s for s in SHAPES if s[2] == s[3]])
def test_silu_matches_reference(kinds, prefixes, heads, kv_heads, dim, cached, limits):
    for seed in range(3):
        drawn = draw_batch(
            kinds, prefixes, heads, kv_heads, dim, cached=cached, limits=limits, seed=seed
        )
        same(*drawn, Activation(normalizer=37.0))


@pytest.mark.parametrize("layout", ["beside", "before", "pages"])
@pytest.mark.parametrize("limits", [False, True], ids=["whole-prefix", "prefix-limits"])
@pytest.mark.parametrize("kinds,prefixes,heads,kv_heads,dim", SHAPES[2:7])
def test_wherever_keys_lie(kinds, prefixes, heads, kv_heads, dim, limits, layout):
    """Views, copies of runs and gathers."""
    for cached in (0.0, 0.6):
        batch, query, keys, values = draw_batch(
            kinds, prefixes, heads, kv_heads, dim, cached=cached, limits=limits
        )
        batch, keys, values = placed(batch, keys, values, layout)
        same(batch, query, keys, values, SOFTMAX)
        if heads == kv_heads:
            same(batch, query, keys, values, Activation(normalizer=37.0))


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("shared", [4, 9, 70])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
def test_shared_rows_are_seen_by_all(cached, shared, kind):
    """Profile and long history (the first nodes) see each other both ways; later nodes see them
    too. The trees beside them share nothing, and their nodes see a part of their prefix.
    """
    drawn = draw_batch([(kind, 70), ("branches", 9)], [5, 40], 2, 2, 16, cached=cached)
    batch, query, keys, values = drawn
    tree = replace(batch.tree, shared=torch.tensor([shared, 0]))
    assert tree.dense_mask()[0, 3]
    limits = torch.where(tree.tree_ids() > 0, torch.arange(79) % 41, 5)
    for prefix_limits in (None, limits):
        both = replace(batch, tree=replace(tree, prefix_limits=prefix_limits))
        same(both, query, keys, values, Activation(normalizer=10.0))
        same(both, query, keys, values, SOFTMAX)


def test_limits_in_a_tree_with_shared_rows_take_torchs_way():
    batch, query, keys, values = draw_batch([("tree", 9)], [20], 2, 2, 16, limits=True)
    batch = replace(batch, tree=replace(batch.tree, shared=torch.tensor([2])))
    expected = reference.tree_attention(query, keys, values, batch)
    attention = tree_attention(batch, HeadLayout.of(query, keys))
    got = attention(query, query, query, keys, values)
    assert isinstance(attention, CpuTreeAttention)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("nodes", [2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_many_nodes_of_one_tree(nodes):
    batch, query, keys, values = draw_batch([("branches", nodes)], [5], 1, 1, 8)
    same(batch, query, keys, values, SOFTMAX)


@pytest.mark.parametrize(
    "part,activation",
    covering(
        {"all-new": None, "a-part-of-it": slice(500, 756)},
        {"soft": SOFTMAX, "silu": Activation(normalizer=37.0)},
    ),
)
def test_isolated_branches_have_no_mask_over_the_whole_tree(activation, part):
    """300 branches of up to 20 nodes below one prefix, one of them longer than a block."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 21, (300,), generator=g)
    lengths[40] = 2 * cpu.ROWS + 9
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total, prefix = int(offsets[-1]), torch.arange(150)
    tree = root_branch(torch.zeros(total, dtype=torch.int64), offsets)
    queries = None if part is None else torch.arange(total)[part]
    batch = TreeBatch(tree, queries, torch.arange(150, 150 + total), Prefixes.of([prefix]))
    keys, values = torch.randn(2, 150 + total, 2, 8, generator=g)
    query = torch.randn(batch.num_queries, 2, 8, generator=g)
    same(batch, query, keys, values, activation)
    blocks = cpu._blocks(batch, activation, HeadLayout(2, 1, 8, torch.float32))
    most = 150 + cpu.ROWS + int(lengths.max())
    assert all(block.slots.shape[0] <= most for block in blocks)


def test_neighbours_do_not_change_a_tree():
    """A tree alone and the same tree packed with others give the same rows."""
    batch, query, keys, values = draw_batch(
        [("tree", 20), ("chain", 6), ("branches", 9)], [12, 0, 31], 4, 2, 32
    )
    slots = batch.slots
    packed = in_torch(batch, query, keys, values)
    alone_tree = draw_tree("tree", 20, torch.Generator().manual_seed(0))
    alone = TreeBatch(alone_tree, None, slots[:20], Prefixes.of([batch.prefixes[0]]))
    out = in_torch(alone, query[:20], keys, values)
    torch.testing.assert_close(packed[:20], out, rtol=1e-6, atol=1e-6)


def test_wrong_mask_is_noticed():
    """The comparison can fail: attention that lets a node see its sibling differs from the
    reference.
    """
    batch, query, keys, values = draw_batch([("branches", 12)], [4], 2, 2, 16)
    wrong = TreeBatch(chain(batch.tree.tokens), None, batch.slots, batch.prefixes)
    expected = reference.tree_attention(query, keys, values, batch)
    got = in_torch(wrong, query, keys, values)
    assert (got - expected).abs().max() > 0.01


@pytest.mark.parametrize("cached", [0.0, 0.5], ids=["all-nodes", "some-nodes"])
@pytest.mark.parametrize(
    "kv_heads,activation,limits",
    [
        (2, SOFTMAX, False),
        (4, SOFTMAX, True),
        (4, Activation(7.0), False),
        (4, Activation(7.0), True),
    ],
)
def test_the_reference_has_gradients_for_training(kv_heads, activation, limits, cached):
    """The same gradients as attention of one padded batch under a dense mask, prefix included: of a
    decoder's softmax and of the ranker's silu under its time rule.
    """
    from recserve.models.attention import DenseAttention, DenseSiluAttention

    batch, query, keys, values = draw_batch(
        [("tree", 14)], [6], 4, kv_heads, 16, cached=cached, limits=limits
    )
    order = torch.cat([batch.prefixes[0], batch.slots])
    inputs = [x.double().requires_grad_() for x in (query, keys, values)]
    weight = torch.randn(len(query), 4, 16, generator=torch.Generator().manual_seed(2))
    floats = [x.float() for x in inputs]
    out = reference.tree_attention(*floats, batch, activation)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    mask[6:, 6:] = batch.tree.dense_mask()
    if limits:
        mask[6:, :6] = torch.arange(6) < batch.tree.prefix_limits[:, None]
    nodes = torch.arange(14) if batch.queries is None else batch.queries
    padded = torch.zeros(20, 4, 16).index_copy(0, nodes + 6, floats[0])
    attend = DenseAttention(mask)
    if activation.normalizer is not None:
        attend = DenseSiluAttention(mask, activation.normalizer)
    dense = attend(0, padded[None], floats[1][order][None], floats[2][order][None])
    expected = torch.autograd.grad((dense[0, nodes + 6] * weight).sum(), inputs)
    for one, two in zip(got, expected, strict=True):
        assert one.abs().max() > 0.1
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nodes", [1, 20, 200])
@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (7, 1)])
def test_halves_side_by_side_with_their_prefix(dtype, nodes, heads, kv_heads):
    """One row alone, few by the flash kernel, many by float32 products."""
    batch, query, keys, values = draw_batch([("tree", nodes)], [300], heads, kv_heads, 64)
    batch, keys, values = placed(batch, keys, values, "beside")
    query, keys, values = (x.to(dtype) for x in (query, keys, values))
    expected = reference.tree_attention(query.float(), keys.float(), values.float(), batch)
    got = in_torch(batch, query, keys, values)
    assert got.dtype == dtype
    assert (got.float() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("prefix", [40, 700])
def test_bfloat16_is_near_the_float32_reference(prefix):
    batch, query, keys, values = draw_batch(
        [("tree", 20), ("branches", 300)], [prefix, 9], 4, 2, 32
    )
    query, keys, values = (x.bfloat16() for x in (query, keys, values))
    expected = reference.tree_attention(query.float(), keys.float(), values.float(), batch)
    got = in_torch(batch, query, keys, values)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("kinds,prefixes,heads,kv_heads,dim", SHAPES[:-1])
def test_prefixes_in_a_table_are_the_same_prefixes(kinds, prefixes, heads, kv_heads, dim):
    """Behind the end of a prefix, and in the spare slot, stands NaN."""
    batch, query, keys, values = draw_batch(kinds, prefixes, heads, kv_heads, dim)
    owned = torch.cat([batch.slots, *batch.prefixes])
    foreign = torch.ones(keys.shape[0], dtype=torch.bool)
    foreign[owned] = False
    keys[foreign] = values[foreign] = float("nan")
    hole = int(foreign.nonzero()[0])
    expected = reference.tree_attention(query, keys, values, batch)
    table = as_table(batch, max(prefixes) + 3, hole)
    assert torch.equal(table.positions(), batch.positions())
    got = reference.padded_tree_attention(query, keys, values, table)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)
