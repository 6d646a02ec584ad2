"""Results of all C functions on fixed inputs, to compare libraries with each other bit for bit.

    python -m tests.support.c_results [LIBRARY]

prints the name of the library and the digest of the results. Inputs are drawn by numpy from exact
uniform numbers, because torch's random numbers depend on the processor.
"""

import ctypes
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recserve.kernels import backend
from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.attention.reference import SOFTMAX, Activation
from recserve.kernels.decoder.decoder import LayerShape, LayerWeights, NativeLayers
from recserve.kernels.layers import native as layers_native
from recserve.kernels.linear import int8
from recserve.kernels.linear.int8 import Int8Weight
from recserve.kernels.linear.panels import Panels
from recserve.kernels.native import native
from recserve.kernels.tree import chain, from_parents, merge
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.native import (
    BeamKind,
    LevelCodes,
    NativeDescent,
    RecurrentCell,
    StateKind,
    lay_out,
    leaf_bits,
    passed_prefixes,
    wanted_prefixes,
)
from recserve.kernels.trie.trie import LeafFilter, build_trie
from recserve.search.trie_paths import ScoredPaths

# Digests of the results, by level. A wanted change of the arithmetic changes them here, once.
GOLDEN = {
    "x86-64-v3": "4dbcd5721cc370740b9e85e2a9b3f4b9",
    "x86-64-v4": "1b582173cfce0c46d896b642580b9f1b",
    "x86-64-v4-bf16": "53898a7eecaaee299133c4b38f388ace",
}


class Draws:
    """Numbers in [-scale, scale) that are the same on every machine."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1) -> Tensor:
        """Returns a tensor of this shape and type."""
        numbers = (self.random.random(shape) * 2 - 1) * scale
        return torch.from_numpy(numbers).to(dtype)


def c_results() -> dict[str, Tensor]:
    """Returns the results by function and type."""
    found: dict[str, Tensor] = {}
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            outs = {**_rows(dtype), **_attention(dtype), **_layers(dtype), **_searches(dtype)}
            found |= {f"{name} {str(dtype)[6:]}": out for name, out in outs.items()}
        found |= _tries()
    return found


def digest(results: dict[str, Tensor]) -> str:
    """Returns a hash of the results' bits."""
    hashed = hashlib.sha256()
    for name in sorted(results):
        value = results[name].contiguous()
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        hashed.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:32]


def _rows(dtype: torch.dtype) -> dict[str, Tensor]:
    """Products, norms, gates and RoPE, of few and of many rows and of sizes below a vector."""
    draw, outs = Draws(0), {}
    for inner, outer in ((96, 70), (1030, 200), (10, 3)):
        x, weight = draw(40, inner, dtype=dtype, scale=3), draw(outer, inner, scale=0.3)
        bias = draw(outer)
        products = {
            "product": Panels.of(weight.to(dtype), bias),
            "int8": int8.panels(Int8Weight.of(weight), bias, dtype),
        }
        if dtype == torch.float32:
            products["halves"] = Panels.of(weight.half(), bias, torch.float32)
        for name, product in products.items():
            for rows in (1, 5, 40):
                outs[f"{name} {inner} {rows}"] = product(x[:rows])
        outs[f"norm {inner}"] = layers_native.rms_norm(x, x[0].contiguous(), 1e-5)
        outs[f"gate {inner}"] = layers_native.silu_mul(x * 20)
    keys, values = torch.zeros(2, 9, 2, 96, dtype=dtype)
    cos, sin = draw(5, 48), draw(5, 48)
    slots = torch.tensor([7, 0, 3, 8, 1])
    outs["rope"] = layers_native.rope_write(
        draw(5, 8, 96, dtype=dtype), cos, sin, slots, keys, values
    )
    outs["rope keys"], outs["rope values"] = keys, values
    return outs


def _trees(heads: int, kv_heads: int, dim: int) -> tuple[TreeBatch, Tensor, Tensor, Tensor]:
    """Returns a tree of 60 nodes below 200 slots and a chain of 9 below none, with its numbers."""
    draw = Draws(1)
    parents = [-1, *(int(draw.random.integers(max(i - 3, -1), i)) for i in range(1, 60))]
    path: list[int] = []
    for i, parent in enumerate(parents):  # the nearest open node, so that nodes are in preorder
        while path and path[-1] > parent:
            path.pop()
        parents[i] = path[-1] if path else -1
        path.append(i)
    tree = merge([from_parents(torch.arange(60), torch.tensor(parents)), chain(torch.arange(9))])
    slots = torch.from_numpy(draw.random.permutation(280))
    batch = TreeBatch(tree, None, slots[200:269], Prefixes.of([slots[:200], slots[:0]]))
    keys, values = draw(280, kv_heads, dim), draw(280, kv_heads, dim)
    return batch, draw(69, heads, dim, scale=4), keys, values


def _attention(dtype: torch.dtype) -> dict[str, Tensor]:
    outs = {}
    for heads, kv_heads, dim in ((8, 4, 32), (6, 1, 96), (2, 2, 16)):
        batch, query, keys, values = _trees(heads, kv_heads, dim)
        attend = NativeTreeAttention(batch)
        query, keys, values = (x.to(dtype) for x in (query, keys, values))
        outs[f"attention {heads} {dim}"] = attend(query, query, query, keys, values)
        limits = torch.from_numpy(Draws(5).random.integers(0, 201, 69))
        for name, tree in (
            ("limits", replace(batch.tree, prefix_limits=limits)),
            ("shared", replace(batch.tree, shared=torch.tensor([7, 2]))),
        ):
            for activation in (SOFTMAX, Activation(32.0)):
                attend = NativeTreeAttention(replace(batch, tree=tree), activation)
                out = attend(query, query, query, keys, values)
                outs[f"{name} {activation.normalizer} {heads} {dim}"] = out
    return outs


def _layers(dtype: torch.dtype) -> dict[str, Tensor]:
    """Two layers in one call, at a head size whose scale is inexact."""
    heads, kv_heads, dim, size, inner = 4, 2, 96, 80, 130
    draw = Draws(2)
    batch, _, keys, values = _trees(heads, kv_heads, dim)

    def panels(outer: int, width: int) -> Panels:
        return Panels.of(draw(outer, width, dtype=dtype, scale=0.2), None)

    layers = [
        LayerWeights(
            draw(size, dtype=dtype),
            draw(dim, dtype=dtype),
            draw(dim, dtype=dtype),
            draw(size, dtype=dtype),
            panels((heads + 2 * kv_heads) * dim, size),
            panels(size, heads * dim),
            panels(2 * inner, size),
            panels(size, inner),
        )
        for _ in range(2)
    ]
    shape = LayerShape(size, heads, kv_heads, dim, inner, 1e-6)
    run = NativeLayers(layers, draw(size, dtype=dtype), shape)
    attention = NativeTreeAttention(batch)
    pool = (torch.stack([keys, keys]).to(dtype), torch.stack([values, values]).to(dtype))
    turns = draw(69, dim // 2), draw(69, dim // 2)
    x = draw(69, size, dtype=dtype)
    out = run(x, turns, batch.slots, pool, attention, range(2), True)
    return {"layers": out, "layers keys": pool[0], "layers values": pool[1]}


def _searches(dtype: torch.dtype) -> dict[str, Tensor]:
    """Searches by states of prefixes and by a recurrent head, with filters, over inserted ids."""
    draw, size, width = Draws(3), 40, 20
    sizes = (6, 40, 200)
    ids = np.unique(draw.random.integers(0, sizes, (1500, 3)), axis=0)
    ids = torch.from_numpy(draw.random.permutation(ids))
    base = build_trie(ids[:-200], sizes)
    trie = insert_items(base, ids[-200:], torch.arange(200) + len(ids) - 200, len(ids))
    books = [draw(codes, size, dtype=dtype) for codes in sizes]
    inputs = [draw(codes, size, dtype=dtype) for codes in sizes[:-1]]
    weights = [draw(size, size, dtype=dtype, scale=0.3) for _ in sizes[:-1]]
    cells = [RecurrentCell(Panels.of(w, None), x) for w, x in zip(weights, inputs, strict=True)]
    last, contexts = draw(2, size, dtype=dtype), draw(2, 3, size, dtype=dtype)
    keys = torch.arange(1, trie.num_nodes)
    keys = torch.cat([keys, keys + trie.num_nodes])
    hidden = draw(len(keys), size, dtype=dtype)
    bits = leaf_bits(
        draw.random.integers(0, 256, len(ids) // 8 + 1).astype(np.uint8), base.leaf_rows
    )
    rest = LeafFilter((torch.arange(0, 300, 7),), bits, torch.arange(3, 90, 5))
    limits = {"widths": [width, width - 5], "threshold_ranks": [-1, 3], "filters": [None, rest]}
    begun = torch.zeros(2, 1), torch.empty(2, 1, 0, dtype=torch.int64)
    levels = [LevelCodes.of(book) for book in books]
    outs = {"bits": bits.words, "counts": bits.counts}
    for name, search, states in (
        ("states", NativeDescent(levels), {"scored_keys": keys, "scored_hidden": hidden}),
        ("head", NativeDescent(levels, cells), {"contexts": contexts}),
    ):
        found = search(trie, *begun, last, 3, **limits, **states)
        for level in range(1, found.reached + 1):
            used = found.used[level]
            outs[f"{name} scores {level}"] = found.log_probs[level, :, :used]
            outs[f"{name} paths {level}"] = found.paths[level, :, :used, :level]
        outs[f"{name} passed"] = passed_prefixes(
            found, 1, trie.num_nodes, StateKind.ANY, [-9.0, -5.0]
        )
    return outs


def _tries() -> dict[str, Tensor]:
    """Token trees of prefixes, and the table of prefixes scored before."""
    draw, sizes = Draws(4), (5, 6, 7)
    ids = np.unique(draw.random.integers(0, sizes, (150, 3)), axis=0)
    trie = build_trie(torch.from_numpy(ids), sizes)
    paths = trie.nodes_of_items(torch.from_numpy(draw.random.permutation(len(ids))[:30]))
    paths = paths.view(2, 15, 3)
    outs = {}
    scored = torch.arange(3, 40, 2)
    for which in (BeamKind.ALIVE, BeamKind.FORKED, BeamKind.OPEN):
        wanted = wanted_prefixes(trie, draw(2, 15), paths[:, :, :2], which, scored, [4, 9])
        outs[f"wanted {which}"] = wanted
        laid = lay_out(trie, wanted, 2, torch.tensor([1, 6, 12]), scored, scored.flip(0))
        tree = laid.tree
        columns = (tree.tokens, tree.parents, tree.depths, tree.ends, laid.slots)
        outs[f"laid {which}"] = torch.stack([column for column in columns if column is not None])
        outs[f"laid queries {which}"] = torch.stack([laid.query_keys, laid.query_tokens])
    one = ScoredPaths(scored, scored.flip(0), draw(len(scored), 4))
    table = one.add(torch.tensor([50, 2, 8, 44]), torch.arange(4), draw(4, 4))
    outs |= {"table keys": table.keys, "table slots": table.slots, "table hidden": table.hidden}
    return outs


def main() -> None:
    """Prints the library's name and the digest of its results."""
    if len(sys.argv) > 1:
        chosen = ctypes.CDLL(sys.argv[1])
        native.declare(chosen)
        native.library = lambda: chosen  # type: ignore[assignment]
    library = native.library()
    assert backend.c_is_allowed()
    print("none" if library is None else Path(library._name).name)
    if library is not None:
        print(digest(c_results()))


if __name__ == "__main__":
    main()
