"""Exact attention: as good as the reference, and bit for bit the same in any company."""

from dataclasses import replace

import pytest
import torch

from recserve.kernels.attention import reference
from recserve.kernels.attention.exact import BITS, ExactTreeAttention, exponents, on_grid, powers
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.tree import TokenTree, chain, from_parents
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from tests.support.attention_batches import SHAPES, draw_batch

SILU = Activation(37.0)


def attend(batch, query, keys, values, activation=SOFTMAX):
    slots = batch.query_slots()
    attention = ExactTreeAttention(batch, activation)
    return attention(query, keys[slots], values[slots], keys, values)


def test_powers_and_exponents():
    assert powers(torch.tensor([-40, 0, 3])).tolist() == [2.0**-40, 1.0, 8.0]
    sizes = torch.tensor([0.0, -1e-30, 0.75, -1.0, 1.5, 3e38])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = sizes[: 5 if dtype == torch.float16 else 6].to(dtype)[:, None] * torch.tensor([1, 0.25])
        bounds, largest = powers(exponents(x.to(dtype))), x.to(dtype).double().abs().amax(-1)
        assert (largest < bounds).all()
        known = largest > 1e-6
        assert (largest[known] * 2 >= bounds[known]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_grid(dtype):
    x = (torch.randn(500, 16) * torch.rand(500, 16) ** 20).to(dtype)
    got = on_grid(x)
    step = powers(exponents(x) - BITS)[:, None]
    assert got.dtype == dtype and torch.equal(on_grid(got), got)
    assert torch.equal((got.double() / step).round() * step, got.double())
    assert ((got.double() - x.double()).abs() <= step / 2).all()
    assert torch.equal(on_grid(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("activation", [SOFTMAX, SILU], ids=["softmax", "silu"])
@pytest.mark.parametrize("limits", [False, True], ids=["whole-prefix", "prefix-limits"])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,prefixes,heads,kv_heads,dim", SHAPES)
def test_matches_reference(kinds, prefixes, heads, kv_heads, dim, cached, limits, activation):
    if activation is SILU:
        kv_heads = heads
    drawn = draw_batch(kinds, prefixes, heads, kv_heads, dim, cached=cached, limits=limits)
    batch, query, keys, values = drawn
    keys, values = on_grid(keys), on_grid(values)
    wanted = reference.tree_attention(
        query.double(), keys.double(), values.double(), batch, activation
    )
    got = attend(batch, query, keys, values, activation)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-6)


def on_path(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while int(tree.parents[path[0]]) >= 0:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@pytest.mark.parametrize("activation", [SOFTMAX, SILU], ids=["softmax", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kinds,prefix", [(("tree", 30), 45), (("branches", 781), 50), (("chain", 90), 700)]
)
def test_a_row_is_the_same_alone_in_a_tree_and_after_a_longer_prefix(
    kinds, prefix, dtype, activation
):
    """Each node by itself after prefix and ancestors, their keys in other places, bit for bit."""
    heads = 4
    kv_heads = heads if activation is SILU else 2
    batch, query, keys, values = draw_batch([kinds], [prefix], heads, kv_heads, 32)
    query, keys, values = query.to(dtype), on_grid(keys.to(dtype)), on_grid(values.to(dtype))
    together = attend(batch, query, keys, values, activation)
    tree = batch.tree
    moved = torch.randperm(keys.shape[0])
    far_keys, far_values = torch.empty_like(keys), torch.empty_like(values)
    far_keys[moved], far_values[moved] = keys, values
    for node in range(0, tree.num_nodes, max(tree.num_nodes // 40, 1)):
        *before, own = on_path(tree, node)
        long_prefix = moved[torch.cat([batch.prefixes[0], batch.slots[before]])]
        alone = TreeBatch(
            chain(torch.zeros(1)), None, moved[batch.slots[[own]]], Prefixes.of([long_prefix])
        )
        got = attend(alone, query[[node]], far_keys, far_values, activation)
        assert torch.equal(got[0], together[node])


def test_plain_attention_would_not_pass():
    """The same comparison with the ordinary path finds differences: the test above can fail."""
    from recserve.kernels.attention.cpu import CpuTreeAttention

    batch, query, keys, values = draw_batch([("tree", 30)], [45], 4, 2, 32)
    heads = HeadLayout.of(query, keys)
    together = CpuTreeAttention(batch, heads)(query, query, query, keys, values)
    differ = 0
    for node in range(30):
        *before, own = on_path(batch.tree, node)
        prefix = torch.cat([batch.prefixes[0], batch.slots[before]])
        alone = TreeBatch(chain(torch.zeros(1)), None, batch.slots[[own]], Prefixes.of([prefix]))
        got = CpuTreeAttention(alone, heads)(query[[node]], query, query, keys, values)
        differ += not torch.equal(got[0], together[node])
    assert differ


def test_siblings_and_order_of_keys_change_nothing():
    """The first child sees the same with and without a sibling, wherever the prefix lies."""
    batch, query, keys, values = draw_batch([("chain", 2)], [600], 2, 2, 16)
    keys, values = on_grid(keys), on_grid(values)
    alone = attend(batch, query, keys, values)
    forked = from_parents(torch.zeros(3, dtype=torch.int64), torch.tensor([-1, 0, 0]))
    slots = torch.cat([batch.slots, torch.tensor([keys.shape[0] - 1])])
    wide = replace(
        batch, tree=forked, slots=slots, prefixes=Prefixes.of([batch.prefixes[0].flip(0)])
    )
    got = attend(wide, torch.cat([query, query[:1]]), keys, values)
    assert torch.equal(got[:2], alone)
