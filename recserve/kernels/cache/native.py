"""Moves of accepted paths in C (moves.c)."""

from __future__ import annotations

from torch import Tensor

from recserve.kernels.cache.fp8 import Stored
from recserve.kernels.native.native import get_library


def move_paths(
    keys: Stored, values: Stored, sources: Tensor, targets: Tensor, lengths: Tensor
) -> None:
    """Runs `moves.move_paths_reference` in C."""
    assert isinstance(keys, Tensor) and isinstance(values, Tensor)
    lengths = lengths.clamp(max=sources.shape[1])
    sources, targets, lengths = (x.long().contiguous() for x in (sources, targets, lengths))
    layers, slots = keys.shape[:2]
    get_library().move_paths(
        keys.data_ptr(),
        values.data_ptr(),
        sources.data_ptr(),
        targets.data_ptr(),
        lengths.data_ptr(),
        lengths.shape[0],
        sources.shape[1],
        layers,
        slots,
        keys.stride(1) * keys.element_size(),
    )
