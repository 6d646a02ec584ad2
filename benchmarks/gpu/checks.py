"""Correctness of every kernel on a device, against its torch reference over random shapes.

`python benchmarks/gpu.py` runs these checks and prints one line for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.kernels.attention import Shape, draw, draw_tree, ours, ours_fp8
from benchmarks.kernels.small_kernels import cases, worst_error
from recserve.kernels.acceptance import acceptance
from recserve.kernels.acceptance.acceptance import Keys
from recserve.kernels.attention import reference
from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.cache.fp8 import Fp8
from recserve.kernels.tree import merge
from recserve.kernels.tree_batch import Prefixes, TreeBatch

# Largest allowed ||got - expected|| / ||expected||. The reference computes `expected` in float32
# from the same inputs.
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Check:
    """Result of one comparison.

    Attributes:
        name: What was compared.
        ok: True if the error is within the limit.
        error: Measured error.
        seconds: Duration.
        note: Reason of a failure.
    """

    name: str
    ok: bool
    error: float
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Task:
    """A comparison that has not run yet.

    Attributes:
        name: What is compared.
        compare: Returns the error.
        limit: Largest allowed error.
    """

    name: str
    compare: Callable[[], float]
    limit: float

    def checked(self) -> Check:
        """Runs the comparison. An exception becomes a failed check, so the next task still runs."""
        began = time.perf_counter()
        try:
            error, note = self.compare(), ""
        except Exception as reason:
            error, note = float("inf"), f"{type(reason).__name__}: {reason}"[:500]
        return Check(self.name, error <= self.limit, error, time.perf_counter() - began, note)


@torch.inference_mode()
def spoil(runner: Any) -> None:
    """Fills an unused pool with finite random numbers, on which no result may depend.

    The numbers are finite because the padding of a captured batch reads them, although its results
    are discarded.
    """
    for pool in (runner.pool.keys, runner.pool.values):
        pool.fill_(1e4)


def kernel_checks(device: str, smoke: bool = False) -> Iterator[Task]:
    """Yields the checks of all kernels."""
    forms = [(torch.float32, 4, 4, 32)] if smoke else FORMS
    for number, (dtype, heads, kv_heads, dim) in enumerate(forms):
        for limits, shared, silu in ((False, False, False), (True, True, True)):
            words = [w for w, on in (("limits, shared, silu", silu), ("plain", not silu)) if on]
            name = f"tree_attention {str(dtype)[6:]} H{heads}/{kv_heads}-D{dim} {words[0]}"
            compare = AttentionCase(dtype, heads, kv_heads, dim, limits, shared, silu, number)
            yield Task(name, lambda c=compare: c.error(device, smoke), LIMITS[dtype])
            rounded = replace(compare, fp8=True)
            name = name.replace("tree_attention", "tree_attention fp8")
            yield Task(name, lambda c=rounded: c.error(device, smoke), LIMITS[dtype])
    if not smoke:
        yield Task("tree_attention, 8,192 nodes", lambda: many_nodes(device), 1e-2)
        for fp8 in (False, True):
            name = f"tree_attention{' fp8' * fp8}, a prefix of 131,072"
            yield Task(name, lambda f=fp8: long_prefix(device, fp8=f), 1e-2)
        yield Task("a pool of more than 2**31 elements", lambda: far_slots(device), 1e-2)
    for case in cases(device, smoke):
        dtype = torch.bfloat16 if device == "cuda" and not smoke else torch.float32
        limit = 0.0 if case.equal else LIMITS[dtype]
        yield Task(case.name, case.error, limit)
    yield Task("noise: the same tokens as on the CPU", lambda: noise_error(device, smoke), 0.0)


FORMS = [
    (torch.bfloat16, 32, 8, 128),
    (torch.float16, 6, 2, 80),
    (torch.float32, 4, 4, 64),
    (torch.bfloat16, 8, 1, 256),
    (torch.bfloat16, 4, 4, 32),
    (torch.float16, 3, 3, 96),
]


@dataclass(frozen=True)
class AttentionCase:
    """Tree attention over trees of several shapes and prefixes of several lengths.

    Slots are scattered, and half of the nodes are cached already. With `fp8`, keys and values have
    8 bits, and the expected result uses their decoded values.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    limits: bool
    shared: bool
    silu: bool
    seed: int
    fp8: bool = False

    def error(self, device: str, smoke: bool) -> float:
        """Returns the relative error against the reference."""
        g = torch.Generator().manual_seed(self.seed)
        sizes = [("tree", 13), ("branches", 5)] if smoke else [
            ("tree", 63), ("branches", 781), ("tree", 1), ("tree", 257),
        ]  # fmt: skip
        prefixes = [37, 0] if smoke else [1000, 200, 0, 8193]
        tree = merge([draw_tree(kind, n, g) for kind, n in sizes])
        if self.limits:
            per_node = torch.tensor(prefixes)[tree.tree_ids()]
            drawn = (torch.rand(tree.num_nodes, generator=g) * (per_node + 1)).long()
            tree = replace(tree, prefix_limits=drawn)
        if self.shared:
            tree = replace(tree, shared=torch.tensor([n // 3 for _, n in sizes]))
        total = tree.num_nodes + sum(prefixes)
        slots = torch.randperm(total + 7, generator=g)[:total].to(device)
        queries = (torch.rand(tree.num_nodes, generator=g) < 0.5).nonzero().flatten()
        batch = TreeBatch(
            tree.to(device),
            queries.to(device),
            slots[sum(prefixes) :],
            Prefixes.of(torch.split(slots[: sum(prefixes)], prefixes)),
        )
        keys, values = torch.randn(2, total + 7, self.kv_heads, self.dim, generator=g).to(
            device, self.dtype
        )
        query = torch.randn(queries.shape[0], self.heads, self.dim, generator=g)
        query = query.to(device, self.dtype)
        activation = Activation(100.0) if self.silu else SOFTMAX
        own = batch.query_slots()
        stored = (Fp8.of(keys), Fp8.of(values)) if self.fp8 else (keys, values)
        attention = tree_attention(batch, HeadLayout.of(query, stored[0]), activation)
        got = attention(query, keys[own], values[own], *stored)
        floats = [x.float() for x in stored]
        expected = reference.tree_attention(query.float(), *floats, batch, activation)
        return worst_error([got], [expected])


def many_nodes(device: str, nodes: int = 8192, prefix: int = 2000) -> float:
    """Checks one tree of `nodes` nodes over a prefix of `prefix` tokens."""
    tree = draw_tree("tree", nodes, torch.Generator().manual_seed(1)).to(device)
    slots = torch.arange(nodes + prefix, device=device)
    batch = TreeBatch(tree, None, slots[prefix:], Prefixes.of([slots[:prefix]]))
    keys, values = torch.randn(2, nodes + prefix, 2, 64, device=device).bfloat16()
    query = torch.randn(nodes, 2, 64, device=device).bfloat16()
    attention = tree_attention(batch, HeadLayout.of(query, keys))
    got = attention(query, keys[prefix:], values[prefix:], keys, values)
    return worst_error([got], [reference.tree_attention(query.float(), keys, values, batch)])


def long_prefix(device: str, tokens: int = 131_072, fp8: bool = False) -> float:
    """Checks a tree over a prefix of `tokens` tokens, which the kernel splits into parts."""
    problem = draw(Shape("tree", 1, tokens, 64, 8, 2, 128), torch.bfloat16, device)
    stored = problem.keys, problem.values
    got = (ours_fp8 if fp8 else ours)(problem)()
    floats = [(Fp8.of(x) if fp8 else x).float() for x in stored]
    expected = reference.tree_attention(problem.query.float(), *floats, problem.batch)
    return worst_error([got], [expected])


def far_slots(device: str, elements: int = 2**31) -> float:
    """Compares a tree in the last slots of a large pool with the same tree in the first slots.

    The last slots are out of reach of 32-bit offsets.
    """
    slots = elements // (8 * 128) + 600
    keys, values = (torch.empty(slots, 8, 128, dtype=torch.bfloat16, device=device) for _ in "kv")
    tree = draw_tree("tree", 64, torch.Generator().manual_seed(1)).to(device)
    near = torch.arange(264, device=device)
    far = near + slots - 264
    for pool in (keys, values):
        pool[far] = torch.randn(264, 8, 128, device=device).bfloat16()
        pool[near] = pool[far]
    query = torch.randn(64, 32, 128, device=device).bfloat16()
    out = []
    for place in (near, far):
        batch = TreeBatch(tree, None, place[200:], Prefixes.of([place[:200]]))
        own = keys[place[200:]], values[place[200:]]
        attention = tree_attention(batch, HeadLayout.of(query, keys))
        out.append(attention(query, *own, keys, values))
    expected = reference.tree_attention(query.float(), keys, values, batch)
    return max(worst_error(out[1:], out[:1]), worst_error(out[:1], [expected]))


def noise_error(device: str, smoke: bool) -> float:
    """Compares tokens sampled at 200 nodes over 32,000 tokens with the reference on the CPU."""
    g = torch.Generator().manual_seed(5)
    nodes, vocabulary = (3, 300) if smoke else (50, 32_000)
    tree = merge([draw_tree("tree", nodes, g) for _ in range(4)])
    logits = torch.randn(4 * nodes, vocabulary, generator=g)
    keys = Keys(torch.randint(-(2**62), 2**62, (4,), generator=g), torch.tensor([0, 7, 2**31, 9]))
    warmth = torch.tensor([0.0, 0.5, 1.0, 2.0])
    expected = acceptance.accept_reference(logits, tree, keys, warmth, 8)
    moved = Keys(keys.seeds.to(device), keys.prefix_lengths.to(device))
    got = acceptance.accept(logits.to(device), tree.to(device), moved, warmth.to(device), 8)
    same = (
        torch.equal(getattr(got, name).cpu(), getattr(expected, name))
        for name in ("nodes", "lengths", "bonus")
    )
    return 0.0 if all(same) else float("inf")
