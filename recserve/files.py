"""Reads files that may come from anywhere, and writes files that are complete or absent.

A path may be a FIFO, which blocks its reader for ever, and a JSON file may hold anything. All
loaders read their files here, so that each of them refuses the same things in the same words.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use has some 35 MB
T = TypeVar("T")
TEMPORARY = ".tmp-"  # how the names of unfinished files begin


class UnreadableFile(ValueError):
    """A file is missing, is no regular file, is too large, or has other content than expected."""


def regular_file(path: Path) -> Path:
    """Returns the path if it is a regular file or a link to one.

    Raises:
        UnreadableFile: If it is missing, or something else such as a folder, FIFO or device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise UnreadableFile(f"{path} is a {kind}; a regular file is needed")
    return path


def read_bytes(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Returns the content of a regular file of at most `most` bytes. Raises UnreadableFile."""
    size = regular_file(path).stat().st_size
    if size > most:
        raise UnreadableFile(f"{path} has {size} bytes; expected at most {most}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises UnreadableFile."""
    return parse_json(read_bytes(path), path)


def parse_json(content: bytes, path: Path) -> Any:
    """Returns what JSON text means; `path` is the file that it comes from.

    Raises:
        UnreadableFile: If it is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise UnreadableFile(f"{path} is nested too deeply to be read") from error
    except ValueError as error:
        raise UnreadableFile(f"{path} is not JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises UnreadableFile if there is something else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableFile(
            f"{path} holds {_kind(content)}; a JSON object is needed, such as {{}}"
        )
    return content


def from_stored(kind: type[T], values: Mapping[str, Any], noun: str) -> T:
    """Makes a dataclass from stored settings.

    Args:
        kind: The dataclass.
        values: Values by field.
        noun: What the settings are of, for the error.

    Raises:
        UnreadableFile: If a setting is unknown to this version, or a required one is missing.
    """
    if not isinstance(values, Mapping):
        raise UnreadableFile(f"{noun} is {_kind(values)}; expected settings by name")
    known = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]
    required = {
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING
    }
    for names, word in ((set(values) - set(known), "unknown"), (required - set(values), "missing")):
        if names:
            listed = ", ".join(sorted(map(str, names)))[:200]
            raise UnreadableFile(
                f"{noun} has {word} settings: {listed}; another version of recserve wrote it"
            )
    return kind(**values)


def _kind(content: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(content), "a number")


def gguf_hint(folder: Path) -> str:
    """Returns a hint if a folder is a GGUF file or holds one."""
    inside = sorted(folder.glob("*"))
    found = [path for path in (folder, *inside) if path.suffix.lower() == ".gguf"]
    if not found:
        return ""
    return (
        f"; {found[0].name} is a GGUF file of llama.cpp, which is not read: use the Hugging Face "
        "folder that it was made from"
    )


@contextmanager
def whole_file(path: Path, shared: bool = False) -> Iterator[Path]:
    """Yields the path of an empty file, which replaces `path` when the block ends.

    Readers find the old file or the new one, never a part, even after a power failure. The file has
    the permissions that the umask leaves, although safetensors writes files for their owner alone.
    If the block raises, the old file stays.

    Args:
        path: The file; its folder exists.
        shared: True if several processes may replace the file at once. What a killed one leaves is
            then a file of its own, which the next one does not overwrite.
    """
    aside = path.with_name(
        f"{TEMPORARY}{os.getpid()}-{path.name}" if shared else TEMPORARY + path.name
    )
    try:
        aside.unlink(missing_ok=True)
        aside.touch(exist_ok=False)
        mode = stat.S_IMODE(aside.stat().st_mode)
        yield aside
        aside.chmod(mode)
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a hidden temporary folder that is renamed to `out` when the block ends.

    If the block raises, the temporary folder is deleted.

    Args:
        out: Path of the folder. It must be free when the block ends.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        folder.replace(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
