"""How much memory a bundle needs, and how much is free."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch

from recserve.bundle.bundle import Bundle
from recserve.engine.engine_config import EngineConfig
from recserve.engine.runtime.cache_size import DEFAULT_BYTES

MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# Loading holds the file and its packed copy at the same time.
COPIES = 2
SERVED = ("recommender", "ranker")


def needed_bytes(bundle: Bundle, config: EngineConfig) -> int:
    """Estimates the memory of a service: two copies of each file, and the KV cache of each model.

    Args:
        bundle: The bundle.
        config: Sizes of the engine.
    """
    files = sum(entry.size for entry in bundle.manifest.files.values())
    cache = DEFAULT_BYTES if config.kv_bytes == "auto" else config.kv_bytes
    return COPIES * files + cache * sum(bundle.has(name) for name in SERVED)


def available_bytes(device: torch.device) -> int | None:
    """Returns the free memory of the device that holds the models; None if it is unknown.

    On a CPU this is the smaller one of the machine's free memory and of what the container's limit
    leaves.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [free for free in (_machine_bytes(MEMORY_INFO), _cgroup_bytes(CGROUP)) if free]
    return min(found, default=None)


def release_freed() -> None:
    """Gives freed memory back to the system, where the C library can do that.

    glibc otherwise keeps much of it, because each replacement of a bundle frees it on a new thread.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _machine_bytes(path: Path) -> int | None:
    """Returns MemAvailable of Linux; None elsewhere."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _cgroup_bytes(folder: Path) -> int | None:
    """Returns what the limit of control group v2 leaves; None without a limit.

    Cached files count as free, because the kernel drops them when memory is needed.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return max(int(limit) - used + int(stat.get("inactive_file", 0)), 1)
