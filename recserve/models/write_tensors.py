"""Writes tensors as a safetensors file that is as readable as any other file of its folder."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, header: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, which replaces an old one as a whole.

    safetensors itself writes files that only their owner can read, and a server often runs as
    another user. This file has the permissions that the umask leaves.

    Args:
        tensors: Tensors by name, on any device; they may share memory.
        path: The file; its folder exists.
        header: Strings for the header of the file.
    """
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    save_file(stored, new, None if header is None else dict(header))
    new.chmod(mode)
    new.replace(path)
