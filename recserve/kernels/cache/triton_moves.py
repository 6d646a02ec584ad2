"""Moves the keys and values of accepted paths to consecutive slots, all layers in one launch.

    pool[l, targets[b, d]] = pool[l, sources[b, d]]   for d < lengths[b], keys and values

FP8 needs a second launch for the exponents. Bytes moved: 4 K D elements per token and layer (read
and written, keys and values). A token that is already in place moves nothing.
Reference: `moves.move_paths_reference`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.cache.fp8 import Stored, parts

BLOCK_DEPTH = 8
BLOCK_WIDTH = 512


@triton.jit(
    do_not_specialize=["longest"],
    do_not_specialize_on_alignment=["sources", "targets", "lengths"],
)
def move_kernel(
    keys, values, sources, targets, lengths, longest, layer_size, width,
    BLOCK_DEPTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Moves one path in one layer; each program owns a range of a slot's elements."""
    path, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    keys += layer * layer_size
    values += layer * layer_size
    length = tl.minimum(tl.load(lengths + path), longest)
    for start in range(0, length, BLOCK_DEPTH):
        step = start + tl.arange(0, BLOCK_DEPTH)
        valid = step < length
        source = tl.load(sources + path * longest + step, mask=valid, other=0).to(tl.int64)
        target = tl.load(targets + path * longest + step, mask=valid, other=0).to(tl.int64)
        mask = (valid & (source != target))[:, None] & (column < width)[None, :]
        read = source[:, None] * width + column[None, :]
        write = target[:, None] * width + column[None, :]
        key = tl.load(keys + read, mask=mask, other=0)
        value = tl.load(values + read, mask=mask, other=0)
        # A target may be a later source of the same block, so all reads precede the writes.
        tl.debug_barrier()
        tl.store(keys + write, key, mask=mask)
        tl.store(values + write, value, mask=mask)
        tl.debug_barrier()


def move_paths(
    keys: Stored, values: Stored, sources: Tensor, targets: Tensor, lengths: Tensor
) -> None:
    """Runs `moves.move_paths_reference`."""
    paths, longest = sources.shape
    sources, targets, lengths = (x.contiguous() for x in (sources, targets, lengths))
    for key, value in zip(parts(keys), parts(values), strict=True):
        layers, slots, *vector = key.shape
        width = math.prod(vector)
        move_kernel[paths, layers, triton.cdiv(width, BLOCK_WIDTH)](
            key, value, sources, targets, lengths,
            longest, slots * width, width, BLOCK_DEPTH=BLOCK_DEPTH, BLOCK_WIDTH=BLOCK_WIDTH,
        )  # fmt: skip
