"""Numbers for FP8 tests: all codes, vectors of very different sizes, pools."""

import torch

from recserve.kernels.cache.fp8 import FP8
from recserve.kernels.cache.kv_pool import KVPool, KVShape

CODES = torch.arange(256, dtype=torch.uint8)


def spread(*size, seed=0):
    """Returns vectors of very different sizes, some with elements far smaller than others."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-30, 30, (*size[:-1], 1), generator=g).float())
    return torch.randn(size, generator=g) ** 3 * scale


def pooled(keys, values):
    """Returns a pool of one layer with these keys and values."""
    pool = KVPool(KVShape(1, *keys.shape[1:]), keys.shape[0] - 1, 1, FP8)
    pool.write(0, torch.arange(keys.shape[0]), keys, values)
    return pool
