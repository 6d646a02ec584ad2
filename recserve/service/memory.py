"""How much memory a bundle or a model needs, and how much is free."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recserve.bundle.bundle import Bundle
from recserve.engine.engine_config import EngineConfig
from recserve.engine.kv_cache import DEFAULT_BYTES
from recserve.kernels.linear.formats import FORMATS, format_names

log = logging.getLogger(__name__)

MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# Loading holds the file and its packed copy at the same time.
COPIES = 2
# Share of the free memory that a model's weights may take. The rest is for caches and activations.
WEIGHTS_SHARE = 0.9
SERVED = ("recommender", "ranker")


def needed_bytes(bundle: Bundle, config: EngineConfig, device: torch.device) -> int:
    """Estimates the memory of a service.

    It is the sum of two copies of each file, the KV cache of each model, and on CUDA the most that
    graphs may take.

    Args:
        bundle: The bundle.
        config: Sizes of the engine.
        device: Device of the models.
    """
    files = sum(entry.size for entry in bundle.manifest.files.values())
    cache = DEFAULT_BYTES if config.kv_bytes == "auto" else config.kv_bytes
    graphs = config.item_graph_bytes if device.type == "cuda" and bundle.has("recommender") else 0
    return COPIES * files + cache * sum(bundle.has(name) for name in SERVED) + graphs


def available_bytes(device: torch.device) -> int | None:
    """Returns the free memory of the device that holds the models; None if it is unknown.

    On a CPU this is the smaller one of the machine's free memory and of what the container's limit
    leaves.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [free for free in (_machine_bytes(MEMORY_INFO), _cgroup_bytes(CGROUP)) if free]
    return min(found, default=None)


@dataclass(frozen=True)
class ModelSize:
    """Size of a model that is about to get its type.

    Attributes:
        num_weights: Number of weights.
        loaded_bytes: Memory that the weights already take on the device. It becomes free while they
            are converted and packed.
        weights: Format of the matrices; None means the model's type.
    """

    num_weights: int
    loaded_bytes: int = 0
    weights: str | None = None

    def fits(self, dtype: torch.dtype, free: int) -> bool:
        """Returns whether the weights in a type leave a tenth of the memory to everything else.

        Args:
            dtype: The type.
            free: Bytes that are free on the device.
        """
        return self.num_weights * dtype.itemsize <= WEIGHTS_SHARE * (free + self.loaded_bytes)

    def in_type(self, dtype: torch.dtype) -> str:
        """Returns the size in a type, for messages."""
        return f"{self.num_weights * dtype.itemsize / 1e9:,.1f} GB in {str(dtype)[6:]}"


def fitting_dtypes(
    candidates: Sequence[torch.dtype], size: ModelSize, device: torch.device
) -> Sequence[torch.dtype]:
    """Returns the types in which a model's weights fit into the free memory.

    With a format for the weights the smallest type always counts as fitting, because the matrices
    take less once they are packed.

    Args:
        candidates: Types to judge.
        size: Size of the model.
        device: Device of the model.

    Raises:
        ValueError: If no type fits.
    """
    free = available_bytes(device)
    if free is None:
        return candidates
    room = f"{(free + size.loaded_bytes) / 1e9:,.1f} GB"
    fitting = [dtype for dtype in candidates if size.fits(dtype, free)]
    for dtype in candidates:
        if dtype not in fitting:
            log.warning(
                "dtype auto: weights of %s do not fit into the %s that are free",
                size.in_type(dtype), room,
            )  # fmt: skip
    smallest = min(candidates, key=lambda dtype: dtype.itemsize)
    if fitting or size.weights is not None:
        return fitting or [smallest]
    least = min(format_names(), key=lambda name: FORMATS[name].bits)
    least_gb = size.num_weights * FORMATS[least].bits / 8e9
    raise ValueError(
        f"dtype auto: the model's weights take {size.in_type(smallest)}, and they may take "
        f"{WEIGHTS_SHARE:.0%} of the {room} that are free; free some, or set `weights: {least}` "
        f"({least_gb:,.1f} GB). A dtype by name is loaded without this check"
    )


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
        limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
        stat = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return max(int(limit) - used + int(stat.get("inactive_file", 0)), 1)
