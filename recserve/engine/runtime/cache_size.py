"""Sizes of key-value caches that the settings leave open: from free memory on CUDA."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)

# On a CPU, and the least on CUDA.
DEFAULT_BYTES = 256 * 2**20
# Share of a GPU's memory that activations, library workspaces and cached states may use.
SPARE_SHARE = 0.1
# Requests of the greatest length that a cache holds at least, for batches to form.
FEW_REQUESTS = 16


def cache_bytes(device: torch.device, num_models: int, graph_bytes: int) -> int:
    """Returns the bytes of each model's key-value cache. The models are loaded already.

    Args:
        device: Device of the models.
        num_models: Number of models that share the device.
        graph_bytes: Memory that CUDA graphs may take.
    """
    if device.type != "cuda":
        return DEFAULT_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(free - SPARE_SHARE * total) - graph_bytes
    found = max(left // num_models, DEFAULT_BYTES)
    log.info("kv_bytes auto: %.1f GiB for each of %d models", found / 2**30, num_models)
    return found


def warn_if_slow(name: str, dtype: torch.dtype, num_slots: int, longest: int) -> None:
    """Logs what makes a model slow on CUDA.

    Args:
        name: Name of the model.
        dtype: Type of its weights.
        num_slots: Tokens that its key-value cache holds.
        longest: Tokens of its longest request.
    """
    if dtype == torch.float32:
        log.warning(
            "the %s computes in float32, which is several times slower than bfloat16 on CUDA", name
        )
    if num_slots < FEW_REQUESTS * longest:
        log.warning(
            "the cache of the %s holds %d tokens, fewer than %d requests of %d; raise kv_bytes",
            name, num_slots, FEW_REQUESTS, longest,
        )  # fmt: skip
