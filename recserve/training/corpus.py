"""Plain text to train a language model on: files, or the sources that every Python carries."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """UTF-8 texts of files, `.zst` ones unpacked. Raises ValueError for a file that is no text."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        with pa.OSFile(str(path), "rb") as file:
            raw = pa.CompressedInputStream(file, "zstd") if path.suffix == ".zst" else file
            try:
                yield raw.read().decode("utf-8")
            except (UnicodeDecodeError, OSError) as error:
                raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error


def standard_library(max_bytes: int = 4_000_000) -> list[str]:
    """Sources of Python's standard library in alphabetical order, tests left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if parts[0] in {"site-packages", "dist-packages"} or "test" in parts or "tests" in parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if size + len(text) > max_bytes:
            break
        texts.append(text)
        size += len(text)
    return texts
