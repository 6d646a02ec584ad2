"""Moves of accepted paths: their keys and values go to the slots of committed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.backend import Operator
from recserve.kernels.cache import native
from recserve.kernels.cache.fp8 import Stored, copy_rows


def move_paths_reference(
    keys: Stored, values: Stored, sources: Tensor, targets: Tensor, lengths: Tensor
) -> None:
    """Moves the keys and values of accepted paths to their final slots, in place, in all layers.

    A target may be a source of the same or an earlier step of its own path, because the nodes of a
    path never lie before their targets. It is never a source of a later step.

    Args:
        keys: [layers, slots, K, D].
        values: Same shape as the keys.
        sources: [B, D + 1] slots.
        targets: [B, D + 1] slots.
        lengths: [B] of any integer type. Only the first lengths[b] slots of path b are moved: none
            if it is negative, all if it exceeds D + 1.
    """
    sources, targets = sources.flatten(), targets.flatten()
    if not sources.shape[0]:
        return
    longest = sources.shape[0] // lengths.shape[0]
    inside = (torch.arange(longest, device=sources.device) < lengths[:, None]).flatten()
    # A step that is not moved repeats one that is, or copies a slot to itself if there is none.
    some = inside.to(torch.uint8).argmax()
    idle_source, idle_target = sources[some], torch.where(inside[some], targets, sources)[some]
    source = torch.where(inside, sources, idle_source)
    target = torch.where(inside, targets, idle_target)
    for pool in (keys, values):
        copy_rows(pool, 1, source, target)


def _c_supports(
    keys: Stored, values: Stored, sources: Tensor, targets: Tensor, lengths: Tensor
) -> bool:
    return isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.is_contiguous()


move_paths = Operator(
    move_paths_reference,
    native.move_paths,
    _c_supports,
    triton="recserve.kernels.cache.triton_moves:move_paths",
)
