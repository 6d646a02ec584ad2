"""The Triton kernel against its plain twin, interpreted on the CPU; and compiled for real GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_interpreter  # noqa: F401
from test_tree_attention import SHAPES, draw_batch

from recserve.kernels import reference, tree_attention
from recserve.kernels.reference import SOFTMAX, Activation

ROOT = Path(__file__).resolve().parents[1]


def same(batch, query, keys, values, activation):
    expected = reference.tree_attention(query, keys, values, batch, activation)
    slots = batch.query_slots()
    kernel = tree_attention.TritonTreeAttention(batch, activation)
    got = kernel(query, keys[slots], values[slots], keys, values)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def splits(request, monkeypatch):
    """Roots in one piece, and split far below the sizes that would need it."""
    if request.param > 1:
        monkeypatch.setattr(tree_attention, "SPLIT_KEYS", 16)
        monkeypatch.setattr(tree_attention, "BLOCK_KEYS", 16)


@pytest.mark.parametrize("limits", [False, True], ids=["whole-root", "root-limits"])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,roots,heads,kv_heads,dim", SHAPES[:-1])
def test_softmax_matches_reference(splits, kinds, roots, heads, kv_heads, dim, cached, limits):
    drawn = draw_batch(kinds, roots, heads, kv_heads, dim, cached=cached, limits=limits)
    same(*drawn, SOFTMAX)


@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,roots,heads,kv_heads,dim", [s for s in SHAPES[:-1] if s[2] == s[3]])
def test_silu_matches_reference(splits, kinds, roots, heads, kv_heads, dim, cached):
    drawn = draw_batch(kinds, roots, heads, kv_heads, dim, cached=cached, limits=True)
    same(*drawn, Activation(normalizer=37.0))


def test_shared_rows_are_seen_by_all():
    from dataclasses import replace

    from recserve.kernels.paged_kv import TreeBatch

    batch, query, keys, values = draw_batch([("chain", 40), ("tree", 9)], [0, 5], 2, 2, 16)
    tree = replace(batch.tree, shared=torch.tensor([21, 0]))
    batch = TreeBatch(tree, None, batch.slots, batch.root_slots)
    same(batch, query, keys, values, SOFTMAX)
    same(batch, query, keys, values, Activation(normalizer=9.0))


def test_every_element_is_written_and_no_foreign_one_is_read(monkeypatch):
    """Outputs start as NaN, and every slot that no tree owns holds NaN."""
    batch, query, keys, values = draw_batch([("tree", 70), ("branches", 33)], [130, 7], 4, 2, 24)
    owned = torch.cat([batch.slots, *batch.root_slots])
    foreign = torch.ones(keys.shape[0], dtype=torch.bool)
    foreign[owned] = False
    assert foreign.any()
    keys[foreign] = values[foreign] = float("nan")
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(float("nan")))
    kernel = tree_attention.TritonTreeAttention(batch)
    got = kernel(query, query, query, keys, values)
    assert torch.isfinite(got).all()


def test_slot_addresses_are_computed_in_64_bits():
    """The address of the last slot of a 2**31-element pool does not wrap."""
    slots, kv_heads, dim = 2**31 // (8 * 128) + 5, 8, 128
    assert slots * kv_heads * dim > 2**31
    source = Path(tree_attention.__file__).read_text()
    body = source[source.index("def _load_rows") : source.index("def _accumulate")]
    assert "slots.to(tl.int64)" in body


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from recserve.kernels import tree_attention as t
capability, dtype = int(sys.argv[1]), sys.argv[2]
pointers = {"query": dtype, "keys": dtype, "values": dtype, "out": dtype, "lse": "fp32"}
for silu, limits, shared, dim, group in [
    (0, 0, 0, 128, 4), (1, 1, 1, 32, 1), (0, 1, 0, 60, 3)
]:
    block_group = triton.next_power_of_2(group)
    constants = dict(
        GROUP=group, BLOCK_GROUP=block_group, BLOCK_Q=64 // block_group, DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_N=64, SPLIT=True,
        SILU=bool(silu), HAS_LIMITS=bool(limits), HAS_SHARED=bool(shared),
    )
    signature = {}
    for name in t._attend.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "inverse_normalizer"):
            signature[name] = "fp32"
        elif name in ("num_rows", "kv_heads"):
            signature[name] = "i32"
        else:
            signature[name] = "*" + pointers.get(name, "i64")
    source = triton.compiler.ASTSource(t._attend, signature, constants)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(built.asm["cubin"]) > 1000
constants = dict(DIM=128, BLOCK_DIM=128, BLOCK_S=8, SILU=False)
signature = {"parts": "*fp32", "lse": "*fp32", "out": "*" + dtype, "num_rows": "i32",
             "num_splits": "i32", **{name: "constexpr" for name in constants}}
source = triton.compiler.ASTSource(t._merge, signature, constants)
built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
print("compiled", len(built.asm["cubin"]))
"""


@pytest.mark.parametrize("capability,dtype", [(80, "bf16"), (90, "bf16"), (90, "fp32")])
def test_compiles_to_machine_code(capability, dtype, tmp_path):
    """Ahead of time, without a GPU: every form of the kernel for sm_80 and sm_90."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), dtype],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "compiled" in run.stdout, run.stderr[-2000:]
