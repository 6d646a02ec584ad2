"""Times of small kernels: acceptance, noise, path move, RoPE with write, heads' top-k, trie step.

Each is compared with its torch reference on the same device, and its row has the bytes that it must
move. `benchmarks.kernels.times` and `python benchmarks/gpu.py` print the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.attention import draw_tree
from benchmarks.support.failures import attempted
from benchmarks.support.timing import milliseconds
from recserve.kernels.acceptance import acceptance, noise
from recserve.kernels.acceptance.acceptance import Keys
from recserve.kernels.cache import moves
from recserve.kernels.cache.fp8 import Fp8
from recserve.kernels.layers import operators, reference
from recserve.kernels.linear import head_topk
from recserve.kernels.tree import TokenTree, merge
from recserve.kernels.trie import level_search
from recserve.kernels.trie.fixed_trie import NOWHERE
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import BatchFilter, LeafBits, Trie, build_trie, pack_leaves


@dataclass(frozen=True)
class Calls:
    """One kernel and its reference on the same inputs.

    Attributes:
        call: Runs the kernel; returns the tensors to compare.
        twin: Runs the reference; returns the tensors to compare.
        bytes: Fewest bytes that must move.
        operations: Number of operations.
    """

    call: Callable[[], Any]
    twin: Callable[[], Any]
    bytes: int
    operations: int = 0


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    Attributes:
        name: Name of the row.
        make: Creates the inputs when they are needed.
        equal: True compares results bit by bit; False by their relative error.
    """

    name: str
    make: Callable[[], Calls]
    equal: bool = False

    def error(self) -> float:
        """Returns the error of the kernel against its reference."""
        calls = self.make()
        return worst_error(calls.call(), calls.twin())


class Drawn:
    """Random numbers on a device from one seed; `smoke` uses tiny sizes."""

    def __init__(self, device: str, smoke: bool) -> None:
        self.device, self.smoke = device, smoke
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype = torch.bfloat16 if device == "cuda" and not smoke else torch.float32
        self.pool_sizes = (2, 40, 2, 16) if smoke else (36, 4096, 8, 128)

    def pools(self, layers: int | None = None) -> list[torch.Tensor]:
        """Returns keys and values [layers, slots, K, D], and copies of them for the reference."""
        most, *rest = self.pool_sizes
        keys, values = (self.normal(layers or most, *rest) for _ in "kv")
        return [keys, values, keys.clone(), values.clone()]

    def normal(self, *sizes: int) -> torch.Tensor:
        drawn = torch.randn(*sizes, generator=self.generator, device=self.device)
        return drawn.to(self.dtype)


def cases(device: str, smoke: bool = False) -> Iterator[Case]:
    """Yields every kernel at its sizes; inputs are created only when a case runs."""

    def case(name: str, make: Callable[..., Calls], *how: Any, equal: bool = False) -> Case:
        return Case(name, lambda: make(Drawn(device, smoke), *how), equal)

    for trees, nodes, vocabulary in (
        [(2, 7, 1500)] if smoke else [(1, 64, 151_936), (16, 16, 32_000)]
    ):
        size = f"{trees} trees of {nodes}, vocabulary {vocabulary}"
        yield case(f"accept {size}", _accept, trees, nodes, vocabulary, equal=True)
        yield case(f"accept_drawn {size}", _accept_drawn, trees, nodes, vocabulary, equal=True)
    for rows, tokens, vocabulary in (
        [(2, 130, 1500)] if smoke else [(1, 64, 151_936), (64, 1024, 151_936)]
    ):
        size = f"{rows} rows, vocabulary {vocabulary}"
        yield case(f"gumbel {size}", _gumbel, rows, vocabulary, equal=True)
        name = f"gumbel_of_tokens {tokens} of {size}"
        yield case(name, _gumbel_of_tokens, rows, tokens, vocabulary, equal=True)
    paths, depth = (2, 5) if smoke else (16, 8)
    yield case(f"path_move {paths} paths of {depth}", _path_move, paths, depth, equal=True)
    rows, heads = (5, 4) if smoke else (1024, 32)
    for word in ("", "fp8 "):
        yield case(f"rope_write {word}{rows} tokens", _rope_write, rows, heads, bool(word))
    sizes = (3, 2, 48, 300) if smoke else (16, 5, 2560, 151_936)
    yield case(
        f"head_topk {sizes[0]} x {sizes[1]} heads, vocabulary {sizes[3]}", _head_topk, *sizes
    )
    items, codes, beams, requests = (500, 8, 6, 2) if smoke else (1_000_000, 256, 256, 8)
    for form in ("", ", filtered", ", live"):
        name = f"best_children {requests} x {beams} beams, {items:,} items{form}"
        yield case(name, _trie, form, items, codes, beams, requests)
    codes, places = (40, 8) if smoke else (8192, 1024)  # of a captured search
    for listed in (0, places // 4):
        name = f"best_children of the root, {codes:,} codes, {listed} of {places} places used"
        yield case(name, _root_children, codes, places, listed)


def _path_move(drawn: Drawn, paths: int, depth: int) -> Calls:
    keys, values, twin_keys, twin_values = drawn.pools()
    layers, slots, kv_heads, dim = keys.shape
    steps = torch.arange(depth, device=drawn.device)
    targets = torch.arange(paths, device=drawn.device)[:, None] * (slots // paths) + steps
    sources = targets + steps // 2 + 1
    lengths = torch.full((paths,), depth, device=drawn.device)

    def moved(k: torch.Tensor, v: torch.Tensor, move: Callable[..., None]) -> Any:
        move(k, v, sources, targets, lengths)
        return k, v

    return Calls(
        lambda: moved(keys, values, moves.move_paths),
        lambda: moved(twin_keys, twin_values, moves.move_paths_reference),
        4 * paths * depth * layers * kv_heads * dim * keys.element_size(),
    )


def _rope_write(drawn: Drawn, rows: int, heads: int, fp8: bool) -> Calls:
    keys, values, twin_keys, twin_values = (pool[0] for pool in drawn.pools(layers=1))
    slots, kv_heads, dim = keys.shape
    qkv = drawn.normal(rows, heads + 2 * kv_heads, dim)
    g, device = drawn.generator, drawn.device
    angles = torch.rand(rows, dim // 2, generator=g, device=device) * 6
    where = torch.randperm(slots, generator=g, device=device)[:rows]

    def roped(pool: tuple[Any, Any], write: Callable[..., torch.Tensor]) -> Any:
        query = write(qkv, angles.cos(), angles.sin(), where, *pool)
        return query, *(x.float() if isinstance(x, Fp8) else x for x in pool)

    pool: tuple[Any, Any] = (keys, values)
    twin_pool: tuple[Any, Any] = (twin_keys, twin_values)
    moved = 2 * qkv.numel() * qkv.element_size() + 8 * angles.numel()
    if fp8:
        pool, twin_pool = ((Fp8.of(keys), Fp8.of(values)) for _ in range(2))
        moved = (qkv.numel() + rows * heads * dim) * qkv.element_size() + 2 * rows * kv_heads * dim
    return Calls(
        lambda: roped(pool, operators.rope_write),
        lambda: roped(twin_pool, reference.rope_write),
        moved,
    )


def _head_topk(drawn: Drawn, rows: int, heads: int, size: int, vocabulary: int) -> Calls:
    wide, matrix = drawn.normal(rows, heads, size), drawn.normal(1, vocabulary, size)
    return Calls(
        lambda: (head_topk.head_topk(wide, matrix, 8).values,),
        lambda: (head_topk.head_topk_reference(wide, matrix, 8).values,),
        matrix.numel() * matrix.element_size(),
        2 * rows * heads * size * vocabulary,
    )


def _drafted(
    drawn: Drawn, trees: int, nodes: int, vocabulary: int
) -> tuple[torch.Tensor, TokenTree, Keys]:
    """Returns logits, trees and keys; drafts are often right, so that accepted paths are long."""
    host = torch.Generator().manual_seed(nodes)
    tree = merge([draw_tree("tree", nodes, host) for _ in range(trees)])
    tree.tokens.copy_(torch.randint(0, vocabulary, tree.tokens.shape, generator=host))
    tree = tree.to(drawn.device)
    logits = drawn.normal(trees * nodes, vocabulary)
    logits[tree.parents.clamp(min=0), tree.tokens] = 9.0
    seeds = torch.randint(0, 2**62, (trees,), generator=host).to(drawn.device)
    return logits, tree, Keys(seeds, torch.full_like(seeds, 100))


def _walked(walk: acceptance.Walk) -> Any:
    return walk.nodes, walk.lengths, walk.bonus


def _accept(drawn: Drawn, trees: int, nodes: int, vocabulary: int) -> Calls:
    logits, tree, keys = _drafted(drawn, trees, nodes, vocabulary)
    warmth = torch.linspace(0, 1, trees, device=drawn.device)
    return Calls(
        lambda: _walked(acceptance.accept(logits, tree, keys, warmth, 8)),
        lambda: _walked(acceptance.accept_reference(logits, tree, keys, warmth, 8)),
        logits.numel() * logits.element_size(),
    )


def _accept_drawn(drawn: Drawn, trees: int, nodes: int, vocabulary: int) -> Calls:
    logits, tree, keys = _drafted(drawn, trees, nodes, vocabulary)
    p = logits.float().softmax(-1)
    values = (logits.float() * 0.7).softmax(-1)
    q = acceptance.DraftProbs(values, torch.arange(len(values), device=drawn.device))
    return Calls(
        lambda: _walked(acceptance.accept_drawn(p, q, tree, keys, 8)),
        lambda: _walked(acceptance.accept_drawn_reference(p, q, tree, keys, 8)),
        3 * trees * vocabulary * 4,
    )


def _noise_keys(drawn: Drawn, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns seeds and positions [rows] of up to 63 bits."""
    g, device = drawn.generator, drawn.device
    seeds, positions = torch.randint(-(2**62), 2**62, (2, rows), generator=g, device=device)
    return seeds, positions


def _gumbel(drawn: Drawn, rows: int, vocabulary: int) -> Calls:
    keys = _noise_keys(drawn, rows)
    return Calls(
        lambda: (noise.gumbel(*keys, vocabulary),),
        lambda: (noise.gumbel_reference(*keys, vocabulary),),
        4 * rows * vocabulary,
    )


def _gumbel_of_tokens(drawn: Drawn, rows: int, count: int, vocabulary: int) -> Calls:
    keys, sizes = _noise_keys(drawn, rows), (rows, count)
    tokens = torch.randint(vocabulary, sizes, generator=drawn.generator, device=drawn.device)
    return Calls(
        lambda: (noise.gumbel_of_tokens(*keys, tokens),),
        lambda: (noise.gumbel_of_tokens_reference(*keys, tokens),),
        12 * rows * count,
    )


def _trie(drawn: Drawn, form: str, items: int, codes: int, beams: int, requests: int) -> Calls:
    g, device = torch.Generator().manual_seed(0), drawn.device
    ids = torch.unique(torch.randint(0, codes**4, (items,), generator=g))
    levels = torch.stack([ids // codes**k % codes for k in (3, 2, 1, 0)], dim=1)
    trie: Trie = build_trie(levels, (codes,) * 4).to(device)
    start, stop = trie.level_starts[1:3]
    nodes = torch.randint(start, stop, (requests, beams), generator=g).to(device)
    log_probs = -torch.rand(requests, beams, generator=g).to(device)
    logits = torch.randn(requests * beams, codes, generator=g).to(device)
    filters = level_search.EVERYTHING
    if form == ", filtered":
        allowed = pack_leaves(torch.rand(requests, trie.num_items, generator=g) < 0.5)
        bits = LeafBits(allowed.words.to(device), allowed.counts.to(device))
        filters = BatchFilter(bits=bits)
    elif form == ", live":
        later = torch.randint(0, codes, (max(items // 100, 20), 4), generator=g).unique(dim=0)
        rows = torch.arange(len(later)) + trie.num_rows
        count = trie.num_rows + len(later)
        trie = insert_items(trie, later.to(device), rows.to(device), count)
    width = trie.widths[1]
    query = level_search.ChildQuery(nodes, log_probs, logits, width, beams, filters=filters)
    return Calls(
        lambda: (level_search.best_children(trie, query).log_probs,),
        lambda: (level_search.best_children_reference(trie, query).log_probs,),
        requests * beams * width * (24 + (24 if filters.bits else 0)),
    )


def _root_children(drawn: Drawn, codes: int, places: int, listed: int) -> Calls:
    """Level 0 of a search: one beam with all codes, and a list of excluded leaves."""
    g, device = torch.Generator().manual_seed(0), drawn.device
    second = torch.randint(0, codes, (codes,), generator=g)
    levels = torch.stack([torch.arange(codes), second], dim=1)
    trie: Trie = build_trie(levels, (codes, codes)).to(device)
    ranks = torch.full((1, places), NOWHERE)
    ranks[0, :listed] = torch.arange(listed) * 2
    filters = BatchFilter(ranks.to(device))
    nodes = torch.zeros(1, 1, dtype=torch.int64, device=device)
    log_probs, logits = torch.zeros(1, 1, device=device), torch.randn(1, codes, generator=g)
    query = level_search.ChildQuery(
        nodes, log_probs, logits.to(device), codes, min(256, codes // 2), filters=filters
    )
    return Calls(
        lambda: (level_search.best_children(trie, query).log_probs,),
        lambda: (level_search.best_children_reference(trie, query).log_probs,),
        codes * 32,
    )


def worst_error(got: Any, expected: Any) -> float:
    """Returns the largest ||got - expected|| / ||expected|| of the tensors; inf if one is not
    finite.
    """
    worst = 0.0
    for one, two in zip(got, expected, strict=True):
        if not bool(torch.isfinite(one.double()).all()):
            return float("inf")
        error = (one.double() - two.double()).norm() / two.double().norm().clamp(min=1e-30)
        worst = max(worst, float(error))
    return worst


def small_kernels(device: str, smoke: bool = False) -> Iterator[dict[str, Any]]:
    """Yields one row per case."""
    for case in cases(device, smoke):
        yield attempted(case.name, partial(timed, case, device))


def timed(case: Case, device: str) -> dict[str, Any]:
    """Returns microseconds of a kernel and of its reference."""
    calls = case.make()
    row: dict[str, Any] = {"kernel": case.name}
    row["ours_us"] = 1e3 * milliseconds(calls.call, device)
    slow = "accept" in case.name
    row["twin_us"] = 1e3 * milliseconds(calls.twin, device, most=5 if slow else 100)
    row["gb_s"] = calls.bytes / row["ours_us"] / 1e3
    row["tflop_s"] = calls.operations / row["ours_us"] / 1e6
    return row
