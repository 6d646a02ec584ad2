"""Converts Medusa heads from a `.pt` file to safetensors; the server reads no pickles.

    python -m benchmarks.text.convert_medusa medusa_lm_head.pt heads/

Only tensors are unpickled (weights_only).
A config.json in the same folder as the file is copied.
Prints the number of tensors and the path of the new file.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file


def convert(source: Path, folder: Path) -> tuple[int, Path]:
    """Writes the heads into the folder; returns the number of tensors and the new file."""
    weights = torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251
    if not isinstance(weights, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in weights.values()
    ):
        raise SystemExit(f"{source.name} holds {type(weights).__name__}, not named tensors")
    folder.mkdir(parents=True, exist_ok=True)
    # Heads that repeat a module share its memory, which safetensors rejects, so clone them.
    own = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    file = folder / "medusa_lm_head.safetensors"
    save_file(own, file)
    config = source.parent / "config.json"
    if config.exists() and not (folder / "config.json").exists():
        shutil.copyfile(config, folder / "config.json")
    return len(own), file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="the .pt file")
    parser.add_argument("folder", type=Path, help="folder that receives the heads")
    given = parser.parse_args()
    count, file = convert(given.source, given.folder)
    print(f"{count} tensors written to {file}")


if __name__ == "__main__":
    main()
