"""FP8 by itself, in the pool, and under attention on a CPU."""

import math

import pytest
import torch

from recserve.kernels.attention import reference as attention_reference
from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.attention.exact import exact_attention
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.cache import moves
from recserve.kernels.cache.fp8 import FP8, Fp8, parts, put
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.layers import reference as layers_reference
from recserve.models.attention import PagedAttention
from tests.support.attention_batches import SHAPES, as_table, draw_batch
from tests.support.fp8_values import CODES, pooled, spread

FINITE = CODES[(CODES & 127) != 127]


def test_codes_are_torch_s():
    codes = FINITE[:, None].expand(-1, 5).contiguous()
    for exponent in (1, 100, 127, 246):
        kept = Fp8(codes, torch.full((len(codes),), exponent, dtype=torch.uint8))
        expected = codes.view(FP8).float() * 2.0 ** (exponent - 127)
        assert torch.equal(kept.float(), expected)
        if exponent == 127:
            assert torch.equal(kept.to(torch.bfloat16).float(), expected)


def test_numbers_become_the_nearest_of_their_vector():
    """A loop over numbers and all codes; between two codes the even one."""
    x = torch.cat([spread(40, 6), torch.tensor([[1.0, 17 / 16, 19 / 16, 2**-17, 3 * 2**-18, 0.0]])])
    kept = Fp8.of(x)
    values = FINITE.view(FP8).double()
    for row, vector in enumerate(x.double().tolist()):
        scale = 2.0 ** (math.floor(math.log2(max(map(abs, vector)))) - 7)
        assert kept.exponents[row] == math.log2(scale) + 127
        for got, number in zip(kept.codes[row].tolist(), vector, strict=True):
            distance = (values - number / scale).abs()
            nearest = FINITE[distance == distance.min()]
            assert got in nearest.tolist()
            assert len(nearest) == 1 or got % 2 == 0 or number == 0


def test_the_error_is_bounded():
    """A sixteenth of a number, or 2 ** -17 of its vector's largest."""
    x = spread(500, 64)
    bound = torch.maximum(x.abs() * 2**-4, x.abs().amax(-1, keepdim=True) * 2**-17)
    assert ((Fp8.of(x).float() - x).abs() <= bound).all()


def test_zeros_and_what_is_not_finite():
    x = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [1.0, -0.0], [1e-30, 1e-45]])
    got = Fp8.of(x).float()
    assert torch.equal(got[[0, 3]], x[[0, 3]])
    assert not got[1:3].isfinite().any(-1).any()
    assert (got[4] - x[4]).abs().max() < 1e-31


def test_a_slot_takes_the_bytes_that_are_said():
    shape = KVShape(3, 2, 20)
    for dtype, size in ((torch.float32, 960), (torch.bfloat16, 480), (FP8, 252)):
        pool = KVPool(shape, 5, 4, dtype)
        held = sum(p.numel() * p.itemsize for x in (pool.keys, pool.values) for p in parts(x))
        assert held == shape.slot_bytes(dtype) * 24 == size * 24


def test_pool_writes_and_copies_bit_for_bit():
    pool = KVPool(KVShape(2, 3, 8), 4, 4, FP8)
    key, value = spread(5, 3, 8), spread(5, 3, 8, seed=1)
    slots = torch.tensor([3, 0, 9, 12, 5])
    pool.write(1, slots, key, value)
    pool.copy_slots(slots, slots + 1)
    for kept, x in ((pool.keys, key), (pool.values, value)):
        for here in (slots, slots + 1):
            assert torch.equal(kept[1].codes[here], Fp8.of(x).codes)
            assert torch.equal(kept[1].exponents[here], Fp8.of(x).exponents)
        assert not kept[0].float().any() and not kept[1][torch.tensor([2, 8])].float().any()


def test_paths_move_with_their_powers():
    pool = KVPool(KVShape(2, 2, 4), 10, 4, FP8)
    for layer in range(2):
        for x in (pool.keys, pool.values):
            put(x[layer], torch.arange(40), spread(40, 2, 4, seed=layer))
    sources, targets = (
        torch.tensor([[3, 6, 7], [22, 23, 29]]),
        torch.tensor([[1, 2, 3], [20, 21, 22]]),
    )
    lengths = torch.tensor([3, 2])
    expected = [part.clone() for x in (pool.keys, pool.values) for part in parts(x)]
    for b, length in enumerate(lengths.tolist()):
        for part in expected:
            part[:, targets[b, :length]] = part[:, sources[b, :length]].clone()
    moves.move_paths(pool.keys, pool.values, sources, targets, lengths)
    got = [part for x in (pool.keys, pool.values) for part in parts(x)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("limits", [False, True], ids=["whole-prefix", "prefix-limits"])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,prefixes,heads,kv_heads,dim", SHAPES)
def test_attention_is_that_to_the_decoded_pool(
    kinds, prefixes, heads, kv_heads, dim, cached, limits
):
    """All paths of a CPU see what the codes say, the computed nodes' own codes too."""
    drawn = draw_batch(kinds, prefixes, heads, kv_heads, dim, cached=cached, limits=limits)
    batch, query, keys, values = drawn
    pool = pooled(keys, values)
    floats = pool.keys[0].float(), pool.values[0].float()
    forms = [(tree_attention, SOFTMAX), (exact_attention, SOFTMAX)]
    if heads == kv_heads:
        forms.append((tree_attention, Activation(37.0)))
    for attention, activation in forms:
        expected = attention_reference.tree_attention(query, *floats, batch, activation)
        twin = attention_reference.tree_attention(
            query, pool.keys[0], pool.values[0], batch, activation
        )
        assert torch.equal(twin, expected)
        own = batch.query_slots()
        attend = PagedAttention(batch, pool, activation, attention)
        got = attend(0, query, keys[own], values[own])
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def test_prefixes_in_a_table():
    batch, query, keys, values = draw_batch([("tree", 20), ("chain", 6)], [12, 31], 4, 2, 16)
    pool = pooled(keys, values)
    expected = attention_reference.tree_attention(query, pool.keys[0], pool.values[0], batch)
    table = as_table(batch, 40, 0)
    attend = tree_attention(table, HeadLayout.of(query, pool.keys[0]))
    got = attend(query, query, query, pool.keys[0], pool.values[0])
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefix", [40, 2000])
def test_it_is_near_the_float32_reference(prefix, dtype):
    """Within 4 % of the norm of what full precision gives, of which e4m3 itself is 2.3 %."""
    batch, query, keys, values = draw_batch([("tree", 30), ("chain", 5)], [prefix, 9], 8, 2, 64)
    expected = attention_reference.tree_attention(query, keys, values, batch)
    pool = pooled(keys.to(dtype), values.to(dtype))
    own = batch.query_slots()
    attend = PagedAttention(batch, pool)
    got = attend(0, query.to(dtype), keys[own].to(dtype), values[own].to(dtype))
    assert got.dtype == dtype
    error = (got.float() - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.04


def test_rope_writes_codes_of_the_turned_keys():
    g = torch.Generator().manual_seed(1)
    qkv, angles = torch.randn(7, 8, 16, generator=g), torch.randn(7, 8, generator=g)
    slots = torch.tensor([4, 0, 2, 9, 7, 1, 5])
    floats, pool = torch.zeros(2, 10, 2, 16), KVPool(KVShape(1, 2, 16), 9, 1, FP8)
    written = angles.cos(), angles.sin(), slots
    expected = layers_reference.rope_write(qkv, *written, *floats)
    got = layers_reference.rope_write(qkv, *written, pool.keys[0], pool.values[0])
    assert torch.equal(got, expected)
    for kept, x in zip((pool.keys[0], pool.values[0]), floats, strict=True):
        assert torch.equal(kept.codes, Fp8.of(x).codes)
