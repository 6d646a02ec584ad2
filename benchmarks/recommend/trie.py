"""Measures the trie: memory, the cost of preparing a filter, and the time of beam search.

    python -m benchmarks.recommend.trie --items 1000000 20000000 --beams 50 256

Semantic ids are drawn uniformly with 256 codes per level and four levels. A fifth level tells items
with the same id apart. Item rows have a random order. `torch` is `best_children` over given logits,
level by level over random beams, with batch 1. `C` is one call through all levels, as a CPU serves
it, with a head of only two dimensions, so that the head costs almost nothing.

A filter allows half of the items. Its cost before the search is measured for several requests:

- the first request with this filter, and a repeated one, both with 200 excluded items
- the first request of a catalogue version in which CHANGED items are new and equally many changed
- for comparison, a count per leaf in int64, computed for each request

Prints lines for each catalogue size, and published figures for comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.support.timing import machine, milliseconds
from recserve.core.allowed import AllowedItems
from recserve.kernels.linear.panels import Panels
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.level_search import BestChildren, ChildQuery, best_children
from recserve.kernels.trie.native import DescentResult, LevelCodes, NativeDescent, RecurrentCell
from recserve.kernels.trie.trie import BatchFilter, LeafBits, LeafFilter, Trie, build_trie
from recserve.search.filters import leaf_filter

CODES = 256
HEAD = 2
EXCLUDED, CHANGED = 200, 4000
PUBLISHED = (
    "STATIC (arXiv 2602.22647), published, of another machine, a TPU v6e, 20,000,000 items:"
    " 0.033 ms a step, about 90 MB per million items"
)


def draw_trie(items: int) -> Trie:
    """Returns the trie of random ids, made distinct by a last level."""
    g = torch.Generator().manual_seed(0)
    packed, _ = torch.sort(torch.randint(0, CODES**4, (items,), generator=g))
    starts = torch.ones(items, dtype=torch.bool)
    starts[1:] = packed[1:] != packed[:-1]
    index = torch.arange(items)
    last = index - torch.where(starts, index, 0).cummax(0).values
    codes = torch.stack([packed // CODES**k % CODES for k in (3, 2, 1, 0)] + [last], dim=1)
    codes = codes[torch.randperm(items, generator=g)]
    return build_trie(codes, (CODES,) * 4 + (int(last.max()) + 1,))


def trie_bytes(trie: Trie) -> int:
    """Returns the bytes of all arrays."""
    arrays = [getattr(trie, field.name) for field in fields(trie)]
    return sum(array.numel() * array.element_size() for array in arrays if hasattr(array, "numel"))


def measure(items: int, widths: list[int]) -> list[str]:
    """Returns the lines of one catalogue size."""
    began = time.perf_counter()
    trie = draw_trie(items)
    built = time.perf_counter() - began
    bitmap = np.random.default_rng(0).random(items) < 0.5
    allowed = AllowedItems.of(bitmap)
    prepared = leaf_filter(trie, None, allowed)
    assert prepared is not None and prepared.bits is not None
    lines = [
        f"{items:>11,} items: {trie_bytes(trie) / items:.1f} MB per million items, built in"
        f" {built:.1f} s, widest nodes {trie.widths}",
        *preparation(trie, bitmap, allowed),
    ]
    for width in widths:
        for name, own in (("no filter", None), ("filter", prepared)):
            bits = None if own is None else own.bits
            times = [
                milliseconds(step_of(trie, level, width, bits)) for level in range(trie.num_levels)
            ]
            in_c = milliseconds(search_of(trie, width, own))
            shown = " + ".join(f"{t:.2f}" for t in times)
            lines.append(
                f"    beam {width:>4}, {name:<9}: C {in_c:.3f} ms, {in_c / trie.num_levels:.3f} a"
                f" level, torch {sum(times):.2f} ms ({shown})"
            )
    return lines


def preparation(trie: Trie, bitmap: np.ndarray, allowed: AllowedItems) -> list[str]:
    """Measures what a request with a filter costs before the search."""
    draw, items = np.random.default_rng(1), len(bitmap)
    excluded = draw.integers(0, items, EXCLUDED)
    version = with_changes(trie, draw)
    inserted = version.insertions
    assert inserted is not None
    rows = np.concatenate([np.sort(draw.choice(items, CHANGED, False)), inserted.rows.numpy()])
    said = draw.random(rows.size) < 0.5

    def later() -> AllowedItems:
        items = AllowedItems(allowed.bits, version.num_rows, rows, said, allowed)
        items.leaves(version)
        return items

    def in_full() -> Tensor:
        kept = torch.from_numpy(bitmap)[trie.leaf_items]
        return torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])

    changed = later()
    first = milliseconds(lambda: leaf_filter(trie, excluded, AllowedItems.of(bitmap)))
    again = milliseconds(lambda: leaf_filter(trie, excluded, allowed))
    anew = milliseconds(later)
    changed_again = milliseconds(lambda: leaf_filter(version, excluded, changed))
    return [
        f"    filter, {allowed.num_bytes / 1e6:.2f} MB: first {first:.2f} ms, again {again:.2f} ms;"
        f" first of a version {anew:.2f} ms, again {changed_again:.2f} ms;"
        f" counted in full {milliseconds(in_full):.2f} ms and {8 * items / 1e6:.0f} MB"
    ]


def with_changes(trie: Trie, draw: np.random.Generator) -> Trie:
    """Returns a catalogue version with about CHANGED additional items."""
    codes = np.unique(draw.integers(0, trie.codebook_sizes, (CHANGED, trie.num_levels)), axis=0)
    rows = torch.arange(trie.num_rows, trie.num_rows + len(codes))
    later = torch.from_numpy(codes)
    return insert_items(trie, later, rows, trie.num_rows + len(codes))


def step_of(
    trie: Trie, level: int, width: int, bits: LeafBits | None
) -> Callable[[], BestChildren]:
    """Returns one level of the search in torch."""
    start, stop = trie.level_starts[level], trie.level_starts[level + 1]
    beams = min(width, stop - start)
    g = torch.Generator().manual_seed(level)
    nodes = torch.randint(start, stop, (1, beams), generator=g)
    log_probs = -torch.rand(1, beams, generator=g)
    logits = torch.randn(beams, trie.codebook_sizes[level], generator=g)
    filters = BatchFilter(bits=bits)
    query = ChildQuery(nodes, log_probs, logits, trie.widths[level], width, filters=filters)
    return partial(best_children, trie, query)


def search_of(trie: Trie, width: int, allowed: LeafFilter | None) -> Callable[[], DescentResult]:
    """Returns the search through all levels in C, with a recurrent head."""
    g = torch.Generator().manual_seed(0)
    books = [torch.randn(codes, HEAD, generator=g) for codes in trie.codebook_sizes]
    mix = Panels.of(torch.randn(HEAD, HEAD, generator=g), None)
    search = NativeDescent(
        [LevelCodes.of(book) for book in books], [RecurrentCell(mix, b) for b in books[:-1]]
    )
    last, contexts = torch.randn(1, HEAD, generator=g), torch.zeros(1, trie.num_levels, HEAD)
    log_probs, paths = torch.zeros(1, 1), torch.empty(1, 1, 0, dtype=torch.int64)

    def run() -> DescentResult:
        return search(
            trie, log_probs, paths, last, trie.num_levels,
            widths=[width], threshold_ranks=[-1], filters=[allowed], contexts=contexts,
        )  # fmt: skip

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[1_000_000], help="catalogue sizes")
    parser.add_argument("--beams", type=int, nargs="+", default=[50, 256], help="beam widths")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    print(machine())
    for items in arguments.items:
        for line in measure(items, arguments.beams):
            print(line, flush=True)
    print(PUBLISHED)


if __name__ == "__main__":
    main()
