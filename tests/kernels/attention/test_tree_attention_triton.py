"""The Triton kernel against its plain twin, interpreted on the CPU."""

from dataclasses import replace

import pytest
import torch

from recserve.kernels.attention import reference, triton_launch
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.attention.triton_attention import TritonTreeAttention
from recserve.kernels.tree import chain, root_branch
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from tests.support import triton_interpreter
from tests.support.attention_batches import SHAPES, as_table, draw_batch, split_short_prefixes
from tests.support.grids import chosen, covering


def same(batch, query, keys, values, activation):
    expected = reference.tree_attention(query, keys, values, batch, activation)
    slots = batch.query_slots()
    kernel = TritonTreeAttention(batch, HeadLayout.of(query, keys), activation)
    got = kernel(query, keys[slots], values[slots], keys, values)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def splits(request, monkeypatch):
    """Prefixes in one piece, and split far below the sizes that would need it."""
    if request.param > 1:
        split_short_prefixes(monkeypatch, 16, request.param)


SPLITS = {"whole": 1, "split": 3}
CACHED = {"all-new": 0.0, "some-scored-before": 0.6}
LIMITS = {"whole-prefix": False, "prefix-limits": True}


@pytest.mark.parametrize(
    "splits,shape,cached,limits",
    covering(SPLITS, SHAPES[:-1], CACHED, LIMITS),
    indirect=["splits"],
)
def test_softmax_matches_reference(splits, shape, cached, limits):
    same(*draw_batch(*shape, cached=cached, limits=limits), SOFTMAX)


@pytest.mark.parametrize(
    "splits,shape,cached",
    covering(SPLITS, [s for s in SHAPES[:-1] if s[2] == s[3]], CACHED, pairs=True),
    indirect=["splits"],
)
def test_silu_matches_reference(splits, shape, cached):
    same(*draw_batch(*shape, cached=cached, limits=True), Activation(normalizer=37.0))


def test_shared_rows_are_seen_by_all():
    batch, query, keys, values = draw_batch([("chain", 40), ("tree", 9)], [0, 5], 2, 2, 16)
    tree = replace(batch.tree, shared=torch.tensor([21, 0]))
    batch = TreeBatch(tree, None, batch.slots, batch.prefixes)
    same(batch, query, keys, values, SOFTMAX)
    same(batch, query, keys, values, Activation(normalizer=9.0))


def test_later_trees_see_their_first_nodes(monkeypatch):
    """A node of a long tree, behind another one, sees ancestors of all blocks before its own."""
    split_short_prefixes(monkeypatch, 16)
    batch, *others = draw_batch([("chain", 33), ("chain", 70)], [5, 3], 2, 2, 16)
    # In front of the ends of the nodes lie zeros, which hide a node from all rows.
    ends = torch.cat([torch.zeros(40, dtype=torch.int64), batch.tree.ends])[40:]
    same(replace(batch, tree=replace(batch.tree, ends=ends)), *others, SOFTMAX)


@pytest.mark.parametrize(
    "activation", chosen({"softmax": SOFTMAX, "silu": Activation(9.0)}, "silu")
)
def test_every_element_is_written_and_no_foreign_one_is_read(splits, activation, monkeypatch):
    """Outputs and partial results start as NaN, and every slot that no tree owns holds NaN."""
    batch, query, keys, values = draw_batch([("tree", 70), ("branches", 33)], [130, 7], 4, 2, 24)
    owned = torch.cat([batch.slots, *batch.prefixes])
    foreign = torch.ones(keys.shape[0], dtype=torch.bool)
    foreign[owned] = False
    assert foreign.any()
    keys[foreign] = values[foreign] = float("nan")
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *n, **o: empty(*n, **o).fill_(float("nan")))
    kernel = TritonTreeAttention(batch, HeadLayout.of(query, keys), activation)
    got = kernel(query, query, query, keys, values)
    assert torch.isfinite(got).all()
    if triton_launch.MAX_SPLITS == 3:
        assert kernel.plan.num_splits == 3


@pytest.mark.parametrize("shared", [0, 5], ids=["branches", "shared"])
def test_blocks_that_no_row_sees_are_not_read(shared, monkeypatch):
    """Three blocks of isolated chains, the last computed now: the middle holds NaN, and the first
    too where no row of it is everybody's.
    """
    split_short_prefixes(monkeypatch, 16)
    tree = root_branch(torch.zeros(48, dtype=torch.int64), torch.arange(0, 49, 4))
    tree = replace(tree, shared=torch.tensor([shared])) if shared else tree
    keys, values = torch.randn(2, 64, 2, 16, generator=torch.Generator().manual_seed(0))
    slots, prefix = torch.arange(48), torch.arange(48, 64)
    batch = TreeBatch(tree, torch.arange(33, 48), slots, Prefixes.of([prefix]))
    query = torch.randn(15, 4, 16, generator=torch.Generator().manual_seed(1))
    expected = reference.tree_attention(query, keys, values, batch)
    keys[16 if shared else 0 : 32] = float("nan")
    got = TritonTreeAttention(batch, HeadLayout.of(query, keys))(query, query, query, keys, values)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


def close_in(dtype, batch, query, keys, values):
    """As far from the reference in float32 as two roundings to dtype allow: one of each weight, in
    sum at most half a unit of the mean of |v|, and one of the result.
    """
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    expected = reference.tree_attention(query.float(), keys.float(), values.float(), batch)
    got = TritonTreeAttention(batch, HeadLayout.of(query, keys))(query, query, query, keys, values)
    sizes = reference.tree_attention(query.float(), keys.float(), values.float().abs(), batch)
    unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    assert got.dtype == dtype
    over = (got.float() - expected).abs() - unit * (sizes + expected.abs())
    assert over.max() < 2e-5


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    "heads,dim,dtype",
    covering(
        ((4, 2), (7, 1), (8, 1), (3, 3)),
        (32, 64, 80, 96, 128, 256),
        (torch.float32, *HALVES),
    ),
)
def test_head_dims_groups_and_halves(heads, dim, dtype):
    close_in(dtype, *draw_batch([("tree", 13), ("branches", 5)], [37, 0], *heads, dim))


@pytest.mark.parametrize(
    "splits,nodes,dim,dtype",
    covering(SPLITS, (1, 17, 64), (64, 128), HALVES),
    indirect=["splits"],
)
def test_trees_of_halves(splits, nodes, dim, dtype):
    """Four query heads for each of two of keys, prefixes whole and in three parts."""
    close_in(dtype, *draw_batch([("tree", nodes)], [37], 8, 2, dim))


def test_a_pool_of_more_than_2_31_elements_is_addressed(monkeypatch):
    """The pool begins 2**31 elements before what is there, so small slots' addresses are far."""
    batch, query, keys, values = draw_batch([("tree", 9), ("chain", 3)], [40, 3], 2, 2, 32)
    expected = reference.tree_attention(query, keys, values, batch)
    shift = 2**31 // (2 * 32) + 3
    far = [triton_interpreter.Far(x, shift * 2 * 32, monkeypatch) for x in (keys, values)]
    moved = TreeBatch(
        batch.tree,
        None,
        batch.slots + shift,
        Prefixes.of([slots + shift for slots in batch.prefixes]),
    )
    got = TritonTreeAttention(moved, HeadLayout.of(query, keys))(query, query, query, *far)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


def test_a_gradient_is_refused():
    batch, query, keys, values = draw_batch([("tree", 5)], [3], 2, 2, 16)
    attention = TritonTreeAttention(batch, HeadLayout.of(query, keys))
    query.requires_grad_()
    with pytest.raises(ValueError, match=r"no gradient .* train through reference.tree_attention"):
        attention(query, query, query, keys, values)
    with torch.no_grad():
        assert torch.isfinite(attention(query, query, query, keys, values)).all()


def of_size(dim):
    """32 heads of float32, 8 of them of keys."""
    return HeadLayout(8, 4, dim, torch.float32)


def test_8192_nodes_are_planned_and_long_prefixes_split():
    """Grids of sizes that are too slow to interpret."""
    tree = root_branch(torch.zeros(8192, dtype=torch.int64), torch.arange(0, 8193, 2))
    slots = torch.arange(8192) + 2**17
    many = TreeBatch(tree, None, slots, Prefixes.of([torch.arange(2**17)]))
    kernel = TritonTreeAttention(many, of_size(64))
    plan = kernel.plan
    trees, starts = kernel.blocks(plan)
    assert plan.block_q * plan.block_group == triton_launch.BLOCK_ROWS and plan.num_splits == 1
    assert plan.warps == 8 and TritonTreeAttention(many, of_size(128)).plan.block_q * 4 == 64
    assert torch.equal(starts[trees == 0], torch.arange(0, 8192, plan.block_q))
    small = TreeBatch(
        chain(torch.zeros(4, dtype=torch.int64)), None, slots[:4], Prefixes.of([slots[:0]])
    )
    assert TritonTreeAttention(small, of_size(64)).plan.num_splits == 1
    long = TreeBatch(small.tree, None, slots[:4], Prefixes.of([torch.arange(2**17)]))
    plan = TritonTreeAttention(long, of_size(64)).plan
    assert plan.num_splits == 33 and plan.num_blocks == 1
    assert TritonTreeAttention(long, of_size(256)).plan.block_keys == 16


def launched(nodes, trees, prefix, machine=triton_launch.HOPPER):
    """32 heads of 128 numbers in bfloat16, 8 of them of keys."""
    work = triton_launch.AttentionWork(nodes, trees, prefix)
    return triton_launch.launch(work, 32, 8, 256, machine)


@pytest.mark.parametrize(
    "nodes,trees,prefix,rows,splits",
    [
        (64, 1, 8192, 128, 8),  # 16 programs of 8 warps: 128 of 132 places
        (64, 1, 32768, 128, 8),
        (1, 1, 32768, 16, 32),  # 8 programs of 4 warps for 264 places
        (1, 1, 300, 16, 1),
        (512, 8, 2048, 128, 1),  # 128 programs: a second wave would cost more than four places
        (64, 64, 32768, 16, 1),
        (2000, 1, 0, 128, 1),
        (64, 1, 200, 32, 1),  # 16 programs of 128 rows would leave most of the device idle
        (64, 1, 512, 64, 4),
        (64, 1, 1024, 128, 8),
    ],
)
def test_prefixes_are_split_to_fill_a_device_once(nodes, trees, prefix, rows, splits):
    """On 132 multiprocessors; the last split is never empty."""
    plan = launched(nodes, trees, prefix)
    assert plan.block_q * plan.block_group == rows and plan.num_splits == splits
    chunk = -(-prefix // splits // plan.block_keys) * plan.block_keys
    assert (splits - 1) * chunk < max(prefix, 1)


@pytest.mark.parametrize("nodes,texts", [(72, 1), (2, 1), (16, 8), (72, 8)])
def test_a_tree_that_fills_a_batch_up_takes_no_share_of_the_device(nodes, texts):
    """Padded steps have one more tree, without a prefix."""
    work = triton_launch.AttentionWork(nodes, texts + 1, 33_000, fillers=1)
    plan = triton_launch.launch(work, 32, 8, 256, triton_launch.HOPPER)
    alone = launched(nodes - 1, texts, 33_000)
    assert (plan.num_splits, plan.block_q) == (alone.num_splits, alone.block_q)
    # Blocks for every way to share the nodes: the other trees may have one node each.
    assert plan.num_blocks >= -(-(nodes - texts) // plan.block_q) + texts
    naive = launched(nodes, texts + 1, 33_000)
    if texts == 1:
        assert plan.num_splits > naive.num_splits


def test_a_device_with_little_shared_memory_keeps_one_block_in_flight():
    assert launched(64, 1, 8192).stages == triton_launch.STAGES
    small = triton_launch.Machine(128, 102_400)
    assert launched(64, 1, 8192, small).stages == triton_launch.FEW_STAGES
    assert launched(1, 1, 8192, small).stages == triton_launch.STAGES


@pytest.mark.parametrize(
    "kinds,prefixes,heads,kv_heads,dim",
    [
        pytest.param(*shape, marks=[pytest.mark.slow] if place else [])
        for place, shape in enumerate(SHAPES[:-1])
    ],
)
def test_a_grid_for_longer_prefixes_gives_the_same(
    kinds, prefixes, heads, kv_heads, dim, monkeypatch
):
    """Prefixes in a table whose width is many times theirs: most splits have nothing to do, write
    nothing, and are not read; everything that is allocated starts as NaN.
    """
    split_short_prefixes(monkeypatch, 32)
    batch, query, keys, values = draw_batch(kinds, prefixes, heads, kv_heads, dim)
    expected = reference.tree_attention(query, keys, values, batch)
    owned = torch.cat([batch.slots, *batch.prefixes])
    foreign = torch.ones(keys.shape[0], dtype=torch.bool)
    foreign[owned] = False
    keys[foreign] = values[foreign] = float("nan")
    table = as_table(batch, 700, int(foreign.nonzero()[0]))
    kernel = TritonTreeAttention(table, HeadLayout.of(query, keys))
    empty, splits = torch.empty, kernel.plan.num_splits
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    got = kernel(query, query, query, keys, values)
    assert splits > 4
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)
