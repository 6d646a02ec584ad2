"""Writes tensors of torch as a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from recserve.files import whole_file


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, header: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, which replaces an old one as a whole.

    Args:
        tensors: Tensors by name, on any device; they may share memory.
        path: The file; its folder exists.
        header: Strings for the header of the file.
    """
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_file(path) as new:
        save_file(stored, new, None if header is None else dict(header))
