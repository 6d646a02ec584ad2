"""Acceptance, path move, RoPE with write, grouped norm, heads' top-k and the trie step: calls to
time, with the bytes that they must move, beside the torch twin on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from attention import draw_tree
from timing import milliseconds

from recserve.kernels import accept_reference, dispatch, reference, trie_children
from recserve.kernels.accept_reference import Keys
from recserve.kernels.fp8 import Fp8
from recserve.kernels.tree import merge
from recserve.kernels.trie import build_trie
from recserve.kernels.trie_children import leaf_bits
from recserve.kernels.trie_insertion import overlay_trie


@dataclass(frozen=True)
class Case:
    """One kernel at one size. bytes: the fewest that must move. equal: results are compared bit by
    bit, else by their relative error. call, twin: return what is compared, a tuple of tensors.
    """

    name: str
    call: Callable[[], Any]
    twin: Callable[[], Any]
    bytes: int
    operations: int = 0
    equal: bool = False


class Drawn:
    """Numbers on a device, from one seed; smoke: tiny sizes. keys, values [layers, slots, K, D],
    and copies of them for the twins.
    """

    def __init__(self, device: str, smoke: bool) -> None:
        self.device, self.smoke = device, smoke
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype = torch.bfloat16 if device == "cuda" and not smoke else torch.float32
        sizes = (2, 40, 2, 16) if smoke else (36, 4096, 8, 128)
        self.keys, self.values = self.normal(*sizes), self.normal(*sizes)
        self.twin_keys, self.twin_values = self.keys.clone(), self.values.clone()

    def normal(self, *sizes: int) -> torch.Tensor:
        drawn = torch.randn(*sizes, generator=self.generator, device=self.device)
        return drawn.to(self.dtype)


def cases(device: str, smoke: bool = False) -> Iterator[Case]:
    """Every kernel; smoke: tiny."""
    drawn = Drawn(device, smoke)
    for trees, nodes, vocabulary in (
        [(2, 7, 1500)] if smoke else [(1, 64, 151_936), (16, 16, 32_000)]
    ):
        yield from _acceptance(trees, nodes, vocabulary, drawn)
    yield _path_move(drawn)
    yield from _rope_write(drawn)
    yield _grouped_rms_norm(drawn)
    yield _head_topk(drawn)
    yield from _trie(device, smoke)


def _path_move(drawn: Drawn) -> Case:
    layers, slots, kv_heads, dim = drawn.keys.shape
    paths, depth = (2, 5) if drawn.smoke else (16, 8)
    steps = torch.arange(depth, device=drawn.device)
    targets = torch.arange(paths, device=drawn.device)[:, None] * (slots // paths) + steps
    sources = targets + steps // 2 + 1
    lengths = torch.full((paths,), depth, device=drawn.device)

    def moved(k: torch.Tensor, v: torch.Tensor, move: Callable[..., None]) -> Any:
        move(k, v, sources, targets, lengths)
        return k, v

    return Case(
        f"path_move {paths} paths of {depth}, {layers} layers",
        lambda: moved(drawn.keys, drawn.values, dispatch.move_paths),
        lambda: moved(drawn.twin_keys, drawn.twin_values, reference.move_paths),
        4 * paths * depth * layers * kv_heads * dim * drawn.keys.element_size(),
        equal=True,
    )


def _rope_write(drawn: Drawn) -> Iterator[Case]:
    _, slots, kv_heads, dim = drawn.keys.shape
    rows, heads = (5, 4) if drawn.smoke else (1024, 32)
    qkv = drawn.normal(rows, heads + 2 * kv_heads, dim)
    g, device = drawn.generator, drawn.device
    angles = torch.rand(rows, dim // 2, generator=g, device=device) * 6
    where = torch.randperm(slots, generator=g, device=device)[:rows]

    def roped(pool: tuple[Any, Any], write: Callable[..., torch.Tensor]) -> Any:
        query = write(qkv, angles.cos(), angles.sin(), where, *pool)
        return query, *(x.float() if isinstance(x, Fp8) else x for x in pool)

    pool = drawn.keys[0], drawn.values[0]
    twin_pool = drawn.twin_keys[0], drawn.twin_values[0]
    yield Case(
        f"rope_write {rows} tokens",
        lambda: roped(pool, dispatch.rope_write),
        lambda: roped(twin_pool, reference.rope_write),
        2 * qkv.numel() * qkv.element_size() + 8 * angles.numel(),
    )
    codes, twin_codes = ((Fp8.of(pool[0]), Fp8.of(pool[1])) for _ in range(2))
    yield Case(
        f"rope_write fp8 {rows} tokens",
        lambda: roped(codes, dispatch.rope_write),
        lambda: roped(twin_codes, reference.rope_write),
        (qkv.numel() + rows * heads * dim) * qkv.element_size() + 2 * rows * kv_heads * dim,
    )


def _grouped_rms_norm(drawn: Drawn) -> Case:
    rows, groups, size = (5, 3, 50) if drawn.smoke else (1024, 4, 2560)
    hidden, weight = drawn.normal(rows, groups, size), drawn.normal(groups, size)
    return Case(
        f"grouped_rms_norm {rows} x {groups} x {size}",
        lambda: (dispatch.grouped_rms_norm(hidden, weight, 1e-6),),
        lambda: (reference.grouped_rms_norm(hidden, weight, 1e-6),),
        2 * hidden.numel() * hidden.element_size(),
    )


def _head_topk(drawn: Drawn) -> Case:
    rows, heads, size, vocabulary = (3, 2, 48, 300) if drawn.smoke else (16, 5, 2560, 151_936)
    wide, matrix = drawn.normal(rows, heads, size), drawn.normal(1, vocabulary, size)
    return Case(
        f"head_topk {rows} x {heads} heads, vocabulary {vocabulary}",
        lambda: (lambda t: (t.values, t.log_sums))(dispatch.head_topk(wide, matrix, 8)),
        lambda: (lambda t: (t.values, t.log_sums))(reference.head_topk(wide, matrix, 8)),
        matrix.numel() * matrix.element_size(),
        2 * rows * heads * size * vocabulary,
    )


def _acceptance(trees: int, nodes: int, vocabulary: int, drawn: Drawn) -> Iterator[Case]:
    device = drawn.device
    host = torch.Generator().manual_seed(nodes)
    tree = merge([draw_tree("tree", nodes, host) for _ in range(trees)])
    tree.tokens.copy_(torch.randint(0, vocabulary, tree.tokens.shape, generator=host))
    tree = tree.to(device)
    logits = drawn.normal(trees * nodes, vocabulary)
    # Drafts that are often right, so that walks are long.
    logits[tree.parents.clamp(min=0), tree.tokens] = 9.0
    seeds = torch.randint(0, 2**62, (trees,), generator=host).to(device)
    keys = Keys(seeds, torch.full_like(seeds, 100))
    warmth = torch.linspace(0, 1, trees, device=device)

    def walked(walk: accept_reference.Walk) -> Any:
        return walk.nodes, walk.lengths, walk.bonus

    yield Case(
        f"accept {trees} trees of {nodes}, vocabulary {vocabulary}",
        lambda: walked(dispatch.accept(logits, tree, keys, warmth, 8)),
        lambda: walked(accept_reference.accept(logits, tree, keys, warmth, 8)),
        logits.numel() * logits.element_size(),
        equal=True,
    )
    p = logits.float().softmax(-1)
    values = (logits.float() * 0.7).softmax(-1)
    q = accept_reference.DraftProbs(values, torch.arange(len(values), device=device))
    yield Case(
        f"accept_drawn {trees} trees of {nodes}, vocabulary {vocabulary}",
        lambda: walked(dispatch.accept_drawn(p, q, tree, keys, 8)),
        lambda: walked(accept_reference.accept_drawn(p, q, tree, keys, 8)),
        3 * trees * vocabulary * 4,
        equal=True,
    )


def _trie(device: str, smoke: bool) -> Iterator[Case]:
    g = torch.Generator().manual_seed(0)
    items, codes, beams, requests = (500, 8, 6, 2) if smoke else (1_000_000, 256, 256, 8)
    ids = torch.unique(torch.randint(0, codes**4, (items,), generator=g))
    levels = torch.stack([ids // codes**k % codes for k in (3, 2, 1, 0)], dim=1)
    trie = build_trie(levels, (codes,) * 4)
    width, start, stop = trie.widths[1], *trie.level_starts[1:3]
    trie = trie.to(device)
    nodes = torch.randint(start, stop, (requests, beams), generator=g).to(device)
    log_probs = -torch.rand(requests, beams, generator=g).to(device)
    logits = torch.randn(requests * beams, codes, generator=g).to(device)
    allowed = leaf_bits(torch.rand(requests, trie.num_items, generator=g) < 0.5)
    bits = trie_children.LeafBits(allowed.words.to(device), allowed.counts.to(device))
    bits = trie_children.Allowed(bits)
    later = torch.randint(0, codes, (max(items // 100, 20), 4), generator=g).unique(dim=0)
    rows = torch.arange(len(later)) + trie.num_rows
    live = overlay_trie(trie, later.to(device), rows.to(device), trie.num_rows + len(later))
    forms = (("", trie, {}), (", filtered", trie, {"allowed": bits}), (", live", live, {}))
    for name, version, filters in forms:
        arguments = (version, nodes, log_probs, logits, version.widths[1], beams)
        yield Case(
            f"best_children {requests} x {beams} beams, {width} children{name}",
            lambda a=arguments, f=filters: (dispatch.best_children(*a, **f).log_probs,),
            lambda a=arguments, f=filters: (trie_children.best_children(*a, **f).log_probs,),
            requests * beams * width * (24 + (24 if filters else 0)),
        )


def worst_error(got: Any, expected: Any) -> float:
    """Largest ||got - expected|| / ||expected|| over the tensors; inf where one is not finite."""
    worst = 0.0
    for one, two in zip(got, expected, strict=True):
        if not bool(torch.isfinite(one.double()).all()):
            return float("inf")
        error = (one.double() - two.double()).norm() / two.double().norm().clamp(min=1e-30)
        worst = max(worst, float(error))
    return worst


def small_kernels(device: str, smoke: bool = False) -> Iterator[dict[str, Any]]:
    """One row per case."""
    for case in cases(device, smoke):
        row: dict[str, Any] = {"kernel": case.name}
        row["ours_us"] = 1e3 * milliseconds(case.call, device)
        slow = "accept" in case.name
        row["twin_us"] = 1e3 * milliseconds(case.twin, device, most=5 if slow else 100)
        row["gb_s"] = case.bytes / row["ours_us"] / 1e3
        row["tflop_s"] = case.operations / row["ours_us"] / 1e6
        yield row
