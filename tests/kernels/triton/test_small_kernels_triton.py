"""Path move, RoPE with write and heads' top-k: Triton, interpreted, against torch."""

import pytest
import torch

from recserve.kernels.cache import moves, triton_moves
from recserve.kernels.layers import reference, triton_rope_write
from recserve.kernels.linear import head_topk, triton_head_topk
from tests.support import triton_interpreter
from tests.support.path_moves import draw_paths


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, or as a number that is none."""
    empty = torch.empty

    def fill(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", fill)


@pytest.mark.parametrize(
    "paths,longest,layers,kv_heads,dim", [(1, 1, 1, 1, 2), (3, 9, 2, 2, 20), (2, 33, 3, 8, 128)]
)
def test_paths_are_moved(paths, longest, layers, kv_heads, dim):
    sources, targets, lengths, slots = draw_paths(paths, longest)
    lengths = torch.stack([lengths * 0 - 1, lengths], 1)[:, 1]  # a column of results has strides
    keys, values = torch.randn(2, layers, slots, kv_heads, dim)
    expected_keys, expected_values = keys.clone(), values.clone()
    for b in range(paths):
        for step in range(int(lengths[b])):
            expected_keys[:, targets[b, step]] = keys[:, sources[b, step]]
            expected_values[:, targets[b, step]] = values[:, sources[b, step]]
    twin_keys, twin_values = keys.clone(), values.clone()
    moves.move_paths_reference(twin_keys, twin_values, sources, targets, lengths)
    triton_moves.move_paths(keys, values, sources, targets, lengths)
    for got in (twin_keys, keys):
        assert torch.equal(got, expected_keys)
    for got in (twin_values, values):
        assert torch.equal(got, expected_values)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("excess", [0, 9, -9])
def test_wrong_lengths_move_no_other_slots(dtype, excess):
    sources, targets, lengths, slots = draw_paths(2, 3)
    pools = torch.randn(2, 1, slots, 1, 4)
    expected, lengths = pools.clone(), lengths + excess
    moves.move_paths_reference(*expected, sources, targets, lengths)
    triton_moves.move_paths(*pools, sources, targets, lengths.to(dtype))
    assert torch.equal(pools, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "rows,heads,kv_heads,dim", [(1, 1, 1, 2), (7, 6, 2, 80), (63, 8, 8, 64), (5, 3, 3, 96)]
)
def test_rope_and_write(rows, heads, kv_heads, dim, dtype):
    g = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=g).to(dtype)
    angles = torch.randn(rows, dim // 2, generator=g) * 100
    slots = torch.randperm(rows + 9, generator=g)[:rows]
    keys, values = torch.full((2, rows + 9, kv_heads, dim), 5.0, dtype=dtype)
    twin_keys, twin_values = keys.clone(), values.clone()
    expected = reference.rope_write(qkv, angles.cos(), angles.sin(), slots, twin_keys, twin_values)
    got = triton_rope_write.rope_write(qkv, angles.cos(), angles.sin(), slots, keys, values)
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {}
    for one, two in ((got, expected), (keys, twin_keys), (values, twin_values)):
        torch.testing.assert_close(one, two, **tolerance)
    assert (keys == 5).all(-1).all(-1).sum() == 9


def test_rope_is_the_model_s_rope():
    """The pool gets what models/decoder.py computes and writes in two steps."""
    from recserve.models.decoder import Rope

    g = torch.Generator().manual_seed(3)
    qkv, positions = torch.randn(11, 8, 32, generator=g), torch.randint(0, 5000, (11,), generator=g)
    frequencies = 10_000.0 ** -(torch.arange(0, 32, 2) / 32)
    rope = Rope(positions, frequencies, torch.float32)
    keys, values = torch.zeros(2, 20, 2, 32)
    slots = torch.arange(11) + 4
    query = reference.rope_write(qkv, rope.cos, rope.sin, slots, keys, values)
    torch.testing.assert_close(query, rope(qkv[:, :4]))
    torch.testing.assert_close(keys[4:15], rope(qkv[:, 4:6]))
    assert torch.equal(values[4:15], qkv[:, 6:])


@pytest.mark.parametrize("shared", [False, True], ids=["own-matrices", "one-matrix"])
@pytest.mark.parametrize(
    "rows,heads,size,vocabulary,k", [(1, 1, 16, 3, 3), (5, 4, 60, 300, 8), (17, 3, 130, 257, 1)]
)
def test_heads_best_tokens(rows, heads, size, vocabulary, k, shared):
    g = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, heads, size, generator=g)
    weight = torch.randn(1 if shared else heads, vocabulary, size, generator=g)
    expected = head_topk.head_topk_reference(hidden, weight, k)
    got = triton_head_topk.head_topk(hidden, weight, k)
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(got.values, expected.values, rtol=1e-5, atol=1e-4)
    logits = hidden[0, 0] @ weight[0].T
    torch.testing.assert_close(expected.values[0, 0], logits.topk(k).values, rtol=1e-5, atol=1e-4)


def test_equal_logits_go_to_the_lowest_token():
    weight = torch.zeros(1, 400, 16)
    weight[0, [5, 130, 131, 399], 0] = 1.0
    hidden = torch.ones(2, 1, 16)
    got = triton_head_topk.head_topk(hidden, weight, 3)
    assert got.tokens.tolist() == [[[5, 130, 131]]] * 2


def test_a_pool_of_more_than_2_31_elements_is_addressed(monkeypatch):
    """The pool begins 2**31 elements before what is there, so small slots' addresses are far."""
    kv_heads, dim = 2, 64
    shift = 2**31 // (kv_heads * dim) + 3
    keys, values = torch.randn(2, 12, kv_heads, dim)
    far_keys, far_values = (
        triton_interpreter.Far(x, shift * kv_heads * dim, monkeypatch) for x in (keys, values)
    )
    qkv, angles = torch.randn(4, 6, dim), torch.randn(4, dim // 2)
    twin = keys.clone(), values.clone()
    expected = reference.rope_write(qkv, angles.cos(), angles.sin(), torch.arange(4), *twin)
    got = triton_rope_write.rope_write(
        qkv, angles.cos(), angles.sin(), torch.arange(4) + shift, far_keys, far_values
    )
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(keys, twin[0])
    torch.testing.assert_close(values, twin[1])
    moved = keys.clone()
    moved[:2] = keys[[3, 7]]
    sources = torch.tensor([[3, 7]]) + shift
    targets = torch.tensor([[0, 1]]) + shift
    far_keys.shape = far_values.shape = (1, 2**25, kv_heads, dim)
    triton_moves.move_paths(far_keys, far_values, sources, targets, torch.tensor([2]))
    assert torch.equal(keys, moved)


def test_states_past_2_31_elements_are_addressed(monkeypatch):
    """Rows far down a batch: those before are not there."""
    rows, size, vocabulary, k = 5, 60, 300, 4
    hidden, weight = torch.randn(rows, 1, size), torch.randn(1, vocabulary, size)
    expected = head_topk.head_topk_reference(hidden, weight, k)
    blocks, tiles = 2**31 // (size * 16) + 3, 3
    shift = blocks * 16
    best = torch.full((rows, 1, tiles * k), -(2**62))
    assert shift * size > 2**31

    def far(tensor, row):
        return triton_interpreter.Far(tensor, shift * row, monkeypatch)

    with monkeypatch.context() as patch:
        triton_interpreter.start_programs_at(blocks, patch)
        triton_head_topk.head_kernel[1, tiles, 1](
            far(hidden, size), weight, far(best, tiles * k),
            shift + rows, 1, vocabulary, vocabulary * size,
            K=k, SIZE=size, BLOCK_ROWS=16, BLOCK_TOKENS=128, BLOCK_SIZE=64,
        )  # fmt: skip
    keys = best.topk(k, dim=-1).values
    assert torch.equal(4294967295 - (keys & 4294967295), expected.tokens)


def test_the_weights_of_heads_past_2_31_elements_are_addressed(monkeypatch):
    """The second head's matrix lies 2**31 elements behind the first's, of which none is there."""
    rows, size, vocabulary, k, tiles = 5, 60, 300, 4, 3
    hidden, weight = torch.randn(rows, 2, size), torch.randn(2, vocabulary, size)
    stride = 2**31 + 5
    expected = head_topk.head_topk_reference(hidden, weight, k).tokens
    best = torch.full((rows, 2, tiles * k), -(2**62))
    builder = type(triton_interpreter.interpreter.interpreter_builder)
    far = triton_interpreter.Far(weight[1], stride, monkeypatch)
    for head, matrices in ((0, weight), (1, far)):
        with monkeypatch.context() as patch:
            patch.setattr(
                builder,
                "set_grid_idx",
                lambda self, x, y, z, head=head: setattr(self, "grid_idx", (x, y, head)),
            )
            triton_head_topk.head_kernel[1, tiles, 1](
                hidden, matrices, best, rows, 2, vocabulary, stride,
                K=k, SIZE=size, BLOCK_ROWS=16, BLOCK_TOKENS=128, BLOCK_SIZE=64,
            )  # fmt: skip
    keys = best.topk(k, dim=-1).values
    assert torch.equal(4294967295 - (keys & 4294967295), expected)
