"""Times of tree attention with different block sizes, warps and stages, on a few shapes.

`python benchmarks/gpu.py` prints one row per shape and variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.kernels import attention
from benchmarks.kernels.attention import Shape
from benchmarks.support.timing import Deadline, milliseconds

TEXT = (32, 8, 128)
SHAPES = [
    Shape("tree", 1, 32768, 64, *TEXT),
    Shape("tree", 1, 8192, 64, *TEXT),
    Shape("tree", 16, 8192, 64, *TEXT),
    Shape("tree", 1, 32768, 1, *TEXT),
    Shape("branches", 1, 200, 2000, 4, 4, 64),
]
NAMES = ("BLOCK_ROWS", "BLOCK_KEYS", "WARP_BYTES", "STAGES", "PROGRAM_KEYS")
# The first variant is the default. Stages count by twos: an even number has as much in flight as
# the odd one below it. A larger PROGRAM_KEYS splits prefixes into fewer parts, a smaller one into
# more.
VARIANTS = [
    (128, 64, 2**12, 5, 256),
    (128, 64, 2**12, 3, 256),
    (128, 64, 2**12, 7, 256),
    (128, 64, 2**12, 5, 64),
    (128, 64, 2**12, 5, 1024),
    (64, 64, 2**12, 5, 256),
    (128, 32, 2**12, 5, 256),
    (128, 32, 2**12, 7, 256),
    (64, 32, 2**12, 5, 256),
    (64, 32, 2**12, 7, 256),
    (128, 128, 2**12, 3, 256),
    (256, 64, 2**12, 5, 256),
    (64, 128, 2**12, 3, 256),
    (32, 64, 2**12, 5, 256),
]


@contextmanager
def constants(variant: tuple[int, ...]) -> Iterator[None]:
    """Sets the constants of the launch module inside the context and restores them afterwards."""
    from recserve.kernels.attention import triton_launch as module

    kept = {
        name: getattr(module, name) for name in (*NAMES, "KEY_BLOCK_BYTES", "QUERY_BLOCK_BYTES")
    }
    try:
        for name, value in zip(NAMES, variant, strict=True):
            setattr(module, name, value)
        module.KEY_BLOCK_BYTES = module.QUERY_BLOCK_BYTES = 2**16  # leave the choice to the variant
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def tuning_rows(
    device: str, smoke: bool, deadline: Deadline, share: slice = slice(None)
) -> Iterator[dict[str, Any]]:
    """Yields microseconds of each variant, or of a share of them, at each shape.

    A CPU has no such kernel and yields nothing.
    """
    if device != "cuda":
        return
    shapes = SHAPES[1:2] if smoke else SHAPES
    problems = [attention.draw(shape, torch.bfloat16, device) for shape in shapes]
    for variant in VARIANTS[share]:
        if deadline.passed():
            return
        row: dict[str, Any] = dict(zip(NAMES, variant, strict=True))
        with constants(variant):
            for problem in problems:
                try:
                    ms = milliseconds(attention.ours(problem), device)
                    row[problem.shape.name()] = round(1e3 * ms, 1)
                except Exception as error:  # a variant may exceed shared memory; its row says so
                    row[problem.shape.name()] = f"{type(error).__name__}: {error}"[:120]
        yield row
