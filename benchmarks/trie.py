"""Memory of the trie and time of one level of beam search over it.

    python benchmarks/trie.py --items 1000000 20000000 --beams 50 256

Semantic ids are drawn evenly from 256 codes a level, four levels and one that tells items of the
same id apart. A step is `best_children` over given logits, batch 1; a filter
allows half of the items.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from functools import partial

import torch
from timing import machine, milliseconds

from recserve.kernels.trie import Trie, build_trie
from recserve.kernels.trie_children import best_children, leaf_bits

CODES = 256


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
    for width in widths:
        for name, allowed in (("no filter", None), ("filter", bits)):
            times = []
            for level in range(trie.num_levels):
                start, stop = trie.level_starts[level], trie.level_starts[level + 1]
                beams = min(width, stop - start)
                g = torch.Generator().manual_seed(level)
                nodes = torch.randint(start, stop, (1, beams), generator=g)
                log_probs = -torch.rand(1, beams, generator=g)
                logits = torch.randn(beams, trie.codebook_sizes[level], generator=g)
                arguments = (trie, nodes, log_probs, logits, children[level], width)
                step = partial(best_children, *arguments, allowed=allowed)
                times.append(milliseconds(step))
            shown = " + ".join(f"{t:.2f}" for t in times)
            lines.append(f"    beam {width:>4}, {name:<9}: {sum(times):6.2f} ms, levels {shown}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--beams", type=int, nargs="+", default=[50, 256])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(machine())
    for items in arguments.items:
        for line in measure(items, arguments.beams):
            print(line, flush=True)


if __name__ == "__main__":
    main()
