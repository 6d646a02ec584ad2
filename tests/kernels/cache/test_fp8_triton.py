"""FP8 in the kernels, interpreted on the CPU, against the torch twins."""

import pytest
import torch

from recserve.kernels.attention import reference as attention_reference
from recserve.kernels.attention import triton_attention
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.attention.triton_attention import TritonTreeAttention
from recserve.kernels.cache import moves, triton_fp8, triton_moves
from recserve.kernels.cache.fp8 import FP8, Fp8, parts
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.layers import reference as layers_reference
from recserve.kernels.layers import triton_rope_write
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from tests.support import triton_interpreter
from tests.support.attention_batches import SHAPES, as_table, draw_batch, split_short_prefixes
from tests.support.fp8_values import CODES, pooled, spread
from tests.support.grids import covering
from tests.support.path_moves import draw_paths

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


@triton.jit
def _decode_kernel(codes, out, NATIVE: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(out + place, triton_fp8.decoded(tl.load(codes + place), NATIVE))


@triton.jit
def _encode_kernel(x, codes, exponents, SIZE: tl.constexpr):
    row, place = tl.program_id(0), tl.arange(0, SIZE)
    numbers = tl.load(x + row * SIZE + place)
    exponent = triton_fp8.exponents_of(tl.max(triton_fp8.sizes(numbers), 0))
    tl.store(exponents + row, exponent.to(tl.uint8))
    tl.store(codes + row * SIZE + place, triton_fp8.encoded(numbers, exponent))


@pytest.mark.parametrize("native", [False, True], ids=["put-together", "native"])
def test_decoding_is_torch_s(native):
    out = torch.empty(256, dtype=torch.float16)
    _decode_kernel[(1,)](CODES, out, NATIVE=native)
    expected = CODES.view(FP8).half()
    finite = expected.isfinite()
    assert finite.sum() == 254 and torch.equal(out[finite], expected[finite])


def test_encoding_is_the_twin_s():
    """Drawn vectors, every number between two codes and just beside it, zeros, NaN and inf."""
    codes = CODES[:120].view(FP8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), -middles])
    near = torch.nn.functional.pad(near, (0, -len(near) % 15)).view(-1, 15)
    beside = torch.cat([torch.full((len(near), 1), 240.0), near], 1)
    odd = torch.zeros(5, 16)
    odd[1, 3], odd[2, 0], odd[3, :2] = float("nan"), float("-inf"), torch.tensor([1e-30, 1e-42])
    x = torch.cat([spread(200, 16), beside, beside * 2.0**-60, odd])
    expected = Fp8.of(x)
    got = Fp8(torch.empty_like(expected.codes), torch.empty_like(expected.exponents))
    _encode_kernel[(len(x),)](x, got.codes, got.exponents, SIZE=16)
    assert torch.equal(got.exponents, expected.exponents)
    known = expected.exponents != 255
    assert known.sum() == len(x) - 2
    assert torch.equal(got.codes[known], expected.codes[known])


def poison(pool, batch):
    """Slots that no tree owns come back as NaN; some there must be."""
    foreign = torch.ones(pool.keys.shape[1], dtype=torch.bool)
    foreign[torch.cat([batch.slots, *batch.prefixes])] = False
    assert foreign.any()
    for x in (pool.keys, pool.values):
        x.codes[0, foreign], x.exponents[0, foreign] = 127, 255
    assert not pool.keys[0][foreign].float().isfinite().any()


@pytest.fixture
def poisoned(monkeypatch):
    """What is allocated starts as NaN."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *n, **o: empty(*n, **o).fill_(float("nan")))


def compare(batch, query, pool, activation=SOFTMAX, **tolerance):
    keys, values = pool.keys[0], pool.values[0]
    expected = attention_reference.tree_attention(query.float(), keys, values, batch, activation)
    kernel = TritonTreeAttention(batch, HeadLayout.of(query, keys), activation)
    got = kernel(query, query, query, keys, values)
    torch.testing.assert_close(got.float(), expected, **(tolerance or {"rtol": 2e-5, "atol": 5e-6}))


@pytest.mark.parametrize(
    "shape,split,native",
    covering(
        SHAPES[:-1],
        {"whole": False, "split": True},
        {"put-together": False, "native": True},
    ),
)
def test_attention(shape, split, native, monkeypatch, poisoned):
    monkeypatch.setattr(triton_attention, "has_native", lambda device: native)
    if split:
        split_short_prefixes(monkeypatch, 16)
    cached, limits = (0.6, True) if split else (0.0, False)
    batch, query, keys, values = draw_batch(*shape, cached=cached, limits=limits)
    pool = pooled(keys * 5, values)
    poison(pool, batch)
    compare(batch, query, pool)
    if query.shape[1] == keys.shape[1]:
        compare(batch, query, pool, Activation(37.0))


@pytest.mark.parametrize(
    "heads,kv_heads,dim,dtype",
    [
        (7, 1, 64, torch.float32),
        (3, 3, 96, torch.float16),
        (4, 2, 256, torch.float32),
        (8, 2, 80, torch.float16),
    ],
)
def test_head_dims_groups_and_halves(heads, kv_heads, dim, dtype, poisoned):
    batch, query, keys, values = draw_batch(
        [("tree", 13), ("chain", 5)], [37, 0], heads, kv_heads, dim
    )
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {}
    compare(batch, query.to(dtype), pooled(keys, values), **tolerance)


def test_a_grid_for_longer_prefixes(monkeypatch, poisoned):
    split_short_prefixes(monkeypatch, 32)
    batch, query, keys, values = draw_batch([("tree", 9), ("chain", 1)], [40, 0], 4, 2, 16)
    pool = pooled(keys, values)
    expected = attention_reference.tree_attention(query, pool.keys[0], pool.values[0], batch)
    poison(pool, batch)
    hole = int((pool.keys[0].exponents[:, 0] == 255).nonzero()[0])
    kernel = TritonTreeAttention(as_table(batch, 700, hole), HeadLayout.of(query, pool.keys[0]))
    assert kernel.plan.num_splits > 4
    got = kernel(query, query, query, pool.keys[0], pool.values[0])
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize(
    "rows,heads,kv_heads,dim,dtype",
    [
        (1, 1, 1, 2, torch.float16),
        (7, 6, 2, 80, torch.float32),
        (63, 8, 8, 64, torch.float16),
        (5, 3, 3, 96, torch.float32),
    ],
)
def test_rope_and_write(rows, heads, kv_heads, dim, dtype):
    g = torch.Generator().manual_seed(rows)
    qkv = (torch.randn(rows, heads + 2 * kv_heads, dim, generator=g) * 7).to(dtype)
    angles = torch.randn(rows, dim // 2, generator=g) * 100
    slots = torch.randperm(rows + 9, generator=g)[:rows]
    pools = [KVPool(KVShape(2, kv_heads, dim), rows + 8, 1, FP8) for _ in range(2)]
    for pool in pools:
        for part in (*parts(pool.keys), *parts(pool.values)):
            part.fill_(77)
    queries = []
    for pool, write in zip(
        pools, (triton_rope_write.rope_write, layers_reference.rope_write), strict=True
    ):
        arguments = qkv, angles.cos(), angles.sin(), slots, pool.keys[1], pool.values[1]
        queries.append(write(*arguments))
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {}
    torch.testing.assert_close(*queries, **tolerance)
    got, twin = pools
    for one, two in ((got.keys, twin.keys), (got.values, twin.values)):
        for written, expected in zip(parts(one), parts(two), strict=True):
            assert torch.equal(written, expected)
            assert (written[0] == 77).all()
    assert (got.keys.exponents[1] == 77).all(-1).sum() == 9


@pytest.mark.parametrize(
    "paths,longest,layers,kv_heads,dim", [(3, 9, 2, 2, 20), (2, 33, 3, 8, 128)]
)
def test_paths_are_moved(paths, longest, layers, kv_heads, dim):
    sources, targets, lengths, slots = draw_paths(paths, longest)
    g = torch.Generator().manual_seed(0)
    size = (layers, slots, kv_heads)
    pool = [
        Fp8(
            torch.randint(0, 256, (*size, dim), generator=g, dtype=torch.uint8),
            torch.randint(0, 256, size, generator=g, dtype=torch.uint8),
        )
        for _ in "kv"
    ]
    twin = [Fp8(x.codes.clone(), x.exponents.clone()) for x in pool]
    moves.move_paths_reference(*twin, sources, targets, lengths)
    triton_moves.move_paths(*pool, sources, targets, lengths)
    for one, two in zip(pool, twin, strict=True):
        assert torch.equal(one.codes, two.codes) and torch.equal(one.exponents, two.exponents)


def test_a_pool_of_more_than_2_31_elements_is_addressed(monkeypatch):
    """Codes begin 2**31 bytes before what is there, so small slots' addresses are far."""
    kv_heads, dim = 2, 64
    shift = 2**31 // (kv_heads * dim) + 3

    def far(x):
        codes = triton_interpreter.Far(x.codes, shift * kv_heads * dim, monkeypatch)
        return Fp8(codes, triton_interpreter.Far(x.exponents, shift * kv_heads, monkeypatch))

    batch, query, keys, values = draw_batch([("tree", 9), ("chain", 3)], [40, 3], 4, kv_heads, dim)
    pool = pooled(keys, values)
    stored = pool.keys[0], pool.values[0]
    expected = attention_reference.tree_attention(query, *stored, batch)
    moved = TreeBatch(
        batch.tree,
        None,
        batch.slots + shift,
        Prefixes.of([slots + shift for slots in batch.prefixes]),
    )
    keys, values = map(far, stored)
    got = TritonTreeAttention(moved, HeadLayout.of(query, keys))(query, query, query, keys, values)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)
    qkv, angles = torch.randn(4, 8, dim), torch.randn(4, dim // 2)
    twin = [Fp8(x.codes.clone(), x.exponents.clone()) for x in stored]
    slots = torch.tensor([7, 1, 0, 30])
    layers_reference.rope_write(qkv, angles.cos(), angles.sin(), slots, *twin)
    triton_rope_write.rope_write(qkv, angles.cos(), angles.sin(), slots + shift, keys, values)
    for one, two in zip(stored, twin, strict=True):
        assert torch.equal(one.codes, two.codes) and torch.equal(one.exponents, two.exponents)
