"""The C sources against torch's operators and the references, and what happens without them."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from recserve.kernels import backend, reference
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.cpu import native
from recserve.kernels.cpu.native_attention import HeadLayout, NativeTreeAttention
from recserve.kernels.cpu.native_layers import LayerShape, LayerWeights, NativeLayers
from recserve.kernels.paged_kv import TreeBatch
from recserve.kernels.reference import Activation
from recserve.kernels.tree import chain
from tests.support.attention_batches import SHAPES, draw_batch, placed

TYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def rows(count, size, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, size, generator=g) * scale).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 1000])
def test_rows_are_those_of_torch_and_do_not_know_each_other(size, dtype):
    x, weight = rows(7, size, dtype), rows(1, size, dtype, 1)[0]
    near = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
    got = native.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, F.rms_norm(x, (size,), weight, 1e-5), **near)
    assert torch.equal(native.rms_norm(x[3:4], weight, 1e-5), got[3:4])

    both = rows(7, 2 * size, dtype, scale=6.0)
    got = native.silu_mul(both)
    torch.testing.assert_close(got, F.silu(both[:, :size]) * both[:, size:], **near)
    assert torch.equal(native.silu_mul(both[3:4]), got[3:4])
    assert torch.equal(native.silu_mul(both.view(7, 1, -1)).flatten(1), got)


def test_the_gate_of_what_is_not_a_usual_number():
    gates = torch.tensor([200.0, -200.0, float("inf"), 0.0, -88.5, float("nan"), -87.5])
    got = native.silu_mul(torch.cat([gates, torch.ones(7)])[None])[0]
    assert got[0] == 200 and got[2] == float("inf") and got[3] == 0 and got[5].isnan()
    assert (got[[1, 4, 6]].abs() < 1e-34).all()
    weights = torch.ones(7)
    assert native.rms_norm(gates[None], weights, 1e-5).isnan().any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inner,outer", [(2, 1), (64, 63), (130, 65), (384, 1280), (2816, 200)])
def test_products_of_any_number_of_rows(inner, outer, dtype):
    weight, bias = rows(outer, inner, dtype), rows(1, outer, torch.float32, 1)[0]
    x = rows(150, inner, dtype, 2)
    packed = native.Panels.of(weight, bias)
    whole = packed(x)
    exact = x.double() @ weight.double().T + bias
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(whole.double(), exact, rtol=eps, atol=64 * eps * inner**0.5)
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 13, 64):
        assert torch.equal(packed(x[:count]), whole[:count]), count
    with pytest.raises(ValueError, match=f"expected .*\\[\\.\\.\\., {inner}\\]"):
        packed(rows(1, inner + 2, dtype))


def test_threads_change_no_bit():
    x, weight = rows(9, 512, torch.bfloat16), rows(1000, 512, torch.bfloat16, 1)
    packed = native.Panels.of(weight, None)
    batch, query, keys, values = draw_batch([("tree", 40)] * 3, [200, 0, 90], 8, 4, 32)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            attend = NativeTreeAttention(batch)
            out = attend(query, query, query, keys, values)
            found.append((packed(x), out, native.silu_mul(x)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 64), (1, 1, 32), (7, 1, 128)])
def test_rope_is_written_where_the_reference_writes_it(heads, kv_heads, dim, dtype):
    g = torch.Generator().manual_seed(3)
    qkv = torch.randn(9, heads + 2 * kv_heads, dim, generator=g).to(dtype)
    angles = torch.randn(9, dim // 2, generator=g)
    slots = torch.randperm(30, generator=g)[:9]
    pools = torch.full((2, 2, 30, kv_heads, dim), float("nan"), dtype=dtype)
    both = [
        way(qkv, angles.cos(), angles.sin(), slots, pool[0], pool[1])
        for way, pool in ((reference.rope_write, pools[0]), (native.rope_write, pools[1]))
    ]
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 4e-3}
    torch.testing.assert_close(both[1], both[0], **near)
    torch.testing.assert_close(pools[1], pools[0], equal_nan=True, **near)
    assert torch.equal(pools[1, 1].nan_to_num(9.0), pools[0, 1].nan_to_num(9.0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize(
    "kinds,roots,heads,kv_heads,dim",
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
def test_attention_is_the_references(kinds, roots, heads, kv_heads, dim, cached, dtype):
    """Slots that belong to nobody hold NaN, which would spread."""
    for seed, layout in enumerate(("beside", "before", "pages")):
        batch, query, keys, values = draw_batch(
            kinds, roots, heads, kv_heads, dim, cached=cached, seed=seed
        )
        batch, keys, values = placed(batch, keys, values, layout)
        query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
        expected = reference.tree_attention(query.float(), keys.float(), values.float(), batch)
        foreign = torch.ones(keys.shape[0], dtype=torch.bool)
        foreign[torch.cat([*batch.prefix_slots, batch.slots])] = False
        keys[foreign] = values[foreign] = float("nan")
        got = NativeTreeAttention(batch)(query, query, query, keys, values)
        assert got.dtype == dtype
        near = 2e-6 if dtype == torch.float32 else 6e-3
        assert (got.float() - expected).norm() <= near * expected.norm()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("root", [0, 63, 90])
def test_a_node_has_the_same_bits_whatever_else_is_in_its_tree(root, group, dtype):
    """Among all nodes, as the end of a chain drafted alone, and as the one node under a root that
    its path has joined: plain decoding. Chains pass the end of a block of 32, rows the end of
    what attends at once.
    """
    batch, query, keys, values = draw_batch(
        [("tree", 140), ("deep", 30)], [root, 5], 2 * group, 2, 32, seed=2
    )
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)

    def attend(to, rows):
        return NativeTreeAttention(to)(rows, rows, rows, keys, values)

    whole = attend(batch, query)
    for node in (0, 7, 39, 139, 155, 169):
        path = [node]
        while int(batch.tree.parents[path[0]]) >= 0:
            path.insert(0, int(batch.tree.parents[path[0]]))
        base = batch.prefix_slots[int(node >= 140)]
        drafted = TreeBatch(chain(batch.tree.tokens[path]), None, batch.slots[path], (base,))
        assert torch.equal(attend(drafted, query[path])[-1], whole[node])
        grown = torch.cat([base, batch.slots[path[:-1]]])
        plain = TreeBatch(chain(batch.tree.tokens[[node]]), None, batch.slots[[node]], (grown,))
        assert torch.equal(attend(plain, query[[node]])[0], whole[node])
        only = TreeBatch(batch.tree, torch.tensor([node]), batch.slots, batch.prefix_slots)
        assert torch.equal(attend(only, query[[node]])[0], whole[node])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [32, 96, 288, 384, 448])
def test_a_layer_in_one_call_has_the_bits_of_its_operators(dim, dtype):
    """The scale of the scores, dim^-1/2, is rounded alike at every head size."""
    heads, kv_heads, size, inner = 2, 1, 64, 96
    batch, _, keys, values = draw_batch([("tree", 20)], [40], heads, kv_heads, dim)
    count, width = 20, (heads + 2 * kv_heads) * dim
    pools = [(keys.to(dtype), values.to(dtype)) for _ in range(2)]
    norms = rows(2, size, dtype, 1)
    shapes = ((width, size), (size, heads * dim), (2 * inner, size), (size, inner))
    weights = [
        native.Panels.of(rows(n, m, dtype, seed, 0.5), None) for seed, (n, m) in enumerate(shapes)
    ]
    qkv, output, gate_up, down = weights
    layer = LayerWeights(norms[0], None, None, norms[1], *weights)
    attention = NativeTreeAttention(batch)
    x, angles = rows(count, size, dtype, 7), rows(count, dim // 2, torch.float32, 8)
    turns = angles.cos(), angles.sin()
    run = NativeLayers([layer], norms[0], LayerShape(size, heads, kv_heads, dim, inner, 1e-5))
    pool = tuple(side[None] for side in pools[0])
    whole = run(x, turns, batch.slots, pool, attention, range(1), False)

    normed = native.rms_norm(x, norms[0], 1e-5)
    query = native.rope_write(
        qkv(normed).view(count, -1, dim), *turns, batch.slots, pools[1][0], pools[1][1]
    )
    x = x + output(attention(query, query, query, *pools[1]).flatten(1))
    x = x + down(native.silu_mul(gate_up(native.rms_norm(x, norms[1], 1e-5))))
    assert torch.equal(whole, x)
    for one, two in zip(*pools, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("limits", [False, True], ids=["whole-root", "root-limits"])
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
        full = tree.root_limits.masked_fill(tree.tree_ids() > 0, torch.iinfo(torch.int64).max)
        shared = replace(shared, root_limits=full)
    found = []
    for whole in (tree, shared):
        batch = replace(batch, tree=whole)
        found.append(NativeTreeAttention(batch, silu)(query, query, query, keys, values)[:300])
    assert torch.equal(*found)
    for node in (0, 7, 150, 299):
        one = chain(torch.zeros(1, dtype=torch.int64))
        if limits:
            one = replace(one, root_limits=tree.root_limits[[node]])
        alone = TreeBatch(one, None, batch.slots[[node]], batch.prefix_slots[:1])
        row = query[[node]]
        got = NativeTreeAttention(alone, silu)(row, row, row, keys, values)
        assert torch.equal(got[0], found[0][node]), node


def test_heads_that_c_does_not_attend_with():
    assert HeadLayout(2, 2, 64, torch.float32).in_c()
    for heads in (
        HeadLayout(2, 2, 60, torch.float32),
        HeadLayout(2, 2, 64, torch.float16),
        HeadLayout(1, 200, 1024, torch.float32),
    ):
        assert not heads.in_c()


WITHOUT = """
import torch
from recserve.kernels import dispatch, products
from recserve.kernels.cpu import native
x = torch.arange(32.0)[None]
with torch.inference_mode():
    print(native.library() is None, products.runs_in_c(torch.zeros(4, 4)))
    print(dispatch.silu_mul(x).sum().item())
"""


@pytest.mark.parametrize(
    "compiler", ["no-such-compiler", pytest.param("false", marks=pytest.mark.slow)]
)
def test_without_a_compiler_torch_does_the_same(compiler, tmp_path):
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={"CC": compiler, "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert said[:2] == ["True", "False"]
    x = torch.arange(32.0)[None]
    with torch.inference_mode():
        assert float(said[2]) == pytest.approx(native.silu_mul(x).sum().item(), rel=1e-6)
    assert not list(tmp_path.rglob("*.so"))


def test_gradients_take_torchs_way(monkeypatch):
    monkeypatch.setattr(backend, "FORCED", "c")
    x = torch.ones(1, 32)
    assert backend_of(x) is Backend.C
    with torch.inference_mode(False), torch.enable_grad():
        assert backend_of(x) is not Backend.C
