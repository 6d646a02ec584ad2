"""Memory of the trie and time of one level of beam search over it.

    python benchmarks/trie.py --items 1000000 20000000 --beams 50 256

Semantic ids are drawn evenly from 256 codes a level, four levels and one that tells items of the
same id apart. "torch": `best_children` over given logits, level by level over drawn beams, batch 1.
"C": one call through all levels, as a CPU serves it, with a head of two dimensions, so that next to
nothing of it is the head. A filter allows half of the items.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
from timing import machine, milliseconds
from torch import Tensor

from recserve.kernels.leaf_filter import LeafFilter
from recserve.kernels.native import Panels
from recserve.kernels.native_search import (
    Cell,
    Levels,
    Limits,
    NativeSearch,
    States,
)
from recserve.kernels.native_trie import Prefixes
from recserve.kernels.trie import Trie, build_trie
from recserve.kernels.trie_children import BestChildren, LeafBits, best_children, leaf_bits

CODES = 256
HEAD = 2


def draw_trie(items: int) -> Trie:
    """Trie of drawn ids, made distinct by a last level."""
    g = torch.Generator().manual_seed(0)
    packed, _ = torch.sort(torch.randint(0, CODES**4, (items,), generator=g))
    starts = torch.ones(items, dtype=torch.bool)
    starts[1:] = packed[1:] != packed[:-1]
    index = torch.arange(items)
    last = index - torch.where(starts, index, 0).cummax(0).values
    codes = torch.stack([packed // CODES**k % CODES for k in (3, 2, 1, 0)] + [last], dim=1)
    return build_trie(codes, (CODES,) * 4 + (int(last.max()) + 1,))


def trie_bytes(trie: Trie) -> int:
    """All arrays."""
    arrays = [getattr(trie, field.name) for field in fields(trie)]
    return sum(array.numel() * array.element_size() for array in arrays if hasattr(array, "numel"))


def measure(items: int, widths: list[int]) -> list[str]:
    """Lines of one catalogue size."""
    began = time.perf_counter()
    trie = draw_trie(items)
    built = time.perf_counter() - began
    per_million = trie_bytes(trie) / items
    children = trie.widths
    bits = leaf_bits(torch.arange(items)[None] % 2 == 0)
    bits_bytes = bits.words.numel() * 8
    lines = [
        f"{items:>11,} items: {per_million:.1f} MB per million items, built in {built:.1f} s,"
        f" widest nodes {children}, filter {bits_bytes / 1e6:.1f} MB"
    ]
    before = torch.cat(
        [torch.zeros(1, dtype=torch.int64), (torch.arange(items) % 2 == 0).cumsum(0)]
    )
    for width in widths:
        for name, allowed, ranks in (("no filter", None, None), ("filter", bits, before)):
            times = [
                milliseconds(step_of(trie, level, width, allowed))
                for level in range(trie.num_levels)
            ]
            in_c = milliseconds(search_of(trie, width, ranks))
            shown = " + ".join(f"{t:.2f}" for t in times)
            lines.append(
                f"    beam {width:>4}, {name:<9}: C {in_c:.3f} ms, "
                f"torch {sum(times):.2f} ms ({shown})"
            )
    return lines


def step_of(
    trie: Trie, level: int, width: int, allowed: LeafBits | None
) -> Callable[[], BestChildren]:
    """One level in torch."""
    start, stop = trie.level_starts[level], trie.level_starts[level + 1]
    beams = min(width, stop - start)
    g = torch.Generator().manual_seed(level)
    nodes = torch.randint(start, stop, (1, beams), generator=g)
    log_probs = -torch.rand(1, beams, generator=g)
    logits = torch.randn(beams, trie.codebook_sizes[level], generator=g)
    arguments = (trie, nodes, log_probs, logits, trie.widths[level], width)
    return partial(best_children, *arguments, allowed=allowed)


def search_of(trie: Trie, width: int, before: Tensor | None) -> Callable[[], Levels]:
    """All levels in C, by a recurrent head."""
    g = torch.Generator().manual_seed(0)
    books = [torch.randn(codes, HEAD, generator=g) for codes in trie.codebook_sizes]
    mix = Panels.of(torch.randn(HEAD, HEAD, generator=g), None)
    search = NativeSearch(
        [Panels.of(book, None) for book in books], [Cell(mix, b) for b in books[:-1]]
    )
    allowed = None if before is None else LeafFilter((), before)
    limits = Limits([width], [-1], [allowed])
    states = States(
        torch.randn(1, HEAD, generator=g), contexts=torch.zeros(1, trie.num_levels, HEAD)
    )

    begun = Prefixes(torch.zeros(1, 1), torch.empty(1, 1, 0, dtype=torch.int64))

    def run() -> Levels:
        return search(trie.native, begun, limits, states, trie.num_levels)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--beams", type=int, nargs="+", default=[50, 256])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    print(machine())
    for items in arguments.items:
        for line in measure(items, arguments.beams):
            print(line, flush=True)


if __name__ == "__main__":
    main()
