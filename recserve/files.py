"""Reads files that may come from anywhere, and writes files that are complete or absent.

A path may be a FIFO, which blocks its reader for ever, and a JSON file may hold anything. All
loaders read their files here, so that each of them refuses the same things in the same words.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    import numpy as np

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


def parse_json(content: bytes, path: Path, unique: bool = False) -> Any:
    """Returns what JSON text means; `path` is the file that it comes from.

    Args:
        content: The text.
        path: The file.
        unique: Whether an object that has a key twice is refused. Otherwise the last one counts.

    Raises:
        UnreadableFile: If it is not JSON in UTF-8, or is nested too deeply, or if a text in it is
            none that UTF-8 can hold.
    """
    hook = _unique if unique else None
    try:
        found = json.loads(content.decode("utf-8"), parse_int=_whole, object_pairs_hook=hook)
        if b"\\ud" in content or b"\\uD" in content:
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UnreadableFile(
            f"{path} has {half}, half of a surrogate pair; expected text that UTF-8 can hold"
        ) from None
    except RecursionError as error:
        raise UnreadableFile(f"{path} is nested too deeply to be read") from error
    except ValueError as error:
        raise UnreadableFile(f"{path} is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"an object has the key {twice[:80]!r} twice")
    return found


def _whole(digits: str) -> int | float:
    """Returns a whole number. One that no float holds is infinite, as in `1e999`."""
    return int(digits) if len(digits) < 300 else float(digits)


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises UnreadableFile if there is something else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableFile(
            f"{path} holds {_kind(content)}; a JSON object is needed, such as {{}}"
        )
    return content


FORMAT_KEY = "recserve_format"  # in the metadata of Parquet and safetensors files


def check_format(given: object, expected: str, place: object) -> None:
    """Checks the version that stored data names for its format.

    docs/reference/formats.md lists the formats.

    Args:
        given: What the data names; None if it names nothing.
        expected: Name and number of the format that is read here, such as `recserve-bundle/1`.
        place: The file or key, for the message.

    Raises:
        UnreadableFile: If it is another one. The message says what to do.
    """
    if given == expected:
        return
    name, _, number = expected.rpartition("/")
    found = re.fullmatch(rf"{re.escape(name)}/([0-9]{{1,9}})", str(given))
    if given is None:
        advice = "a recserve before 0.1.0 wrote this, or it is damaged"
    elif found and int(found[1]) > int(number):
        advice = "a newer recserve wrote this: use that version, or make it again"
    else:
        advice = "this is damaged, or of another program"
    shown = "missing" if given is None else f"{given!r:.80}"
    raise UnreadableFile(f"{place}: format is {shown}; expected {expected!r}: {advice}")


def check_metadata(metadata: Mapping[Any, Any] | None, expected: str, place: object) -> None:
    """Checks the version that the metadata of a Parquet or safetensors file name. Raises as above.

    Args:
        metadata: Texts or bytes by name; None without any.
        expected: As in `check_format`.
        place: As in `check_format`.
    """
    found = metadata or {}
    given = found.get(FORMAT_KEY, found.get(FORMAT_KEY.encode()))
    check_format(given.decode("latin-1") if isinstance(given, bytes) else given, expected, place)


def read_record(path: Path, kind: type[T]) -> T:
    """Returns the dataclass that a JSON object holds, as `dataclasses.asdict` writes it.

    Raises:
        UnreadableFile: If a field is missing, unknown, or no value of its type. The message names
            file and field.
    """
    values = read_json_object(path)
    try:
        return parse_record(values, kind)
    except (TypeError, ValueError) as error:
        raise UnreadableFile(f"{path}: {error}") from error


def parse_record(values: Mapping[str, Any], kind: type[T], place: str = "") -> T:
    """Returns a dataclass of JSON values; lists become tuples.

    Args:
        values: Fields by name.
        kind: The dataclass.
        place: What the message puts before the name of a field.

    Raises:
        ValueError: If a field is missing, unknown, or no value of its type. Numbers are finite.
    """
    hints = _hints(kind)  # type: ignore[arg-type]  # a dataclass is hashable
    if unknown := sorted(values.keys() - hints.keys()):
        raise ValueError(
            f"{place}{unknown[0]} is unknown; another version of recserve wrote it. Known are "
            f"{', '.join(hints)}"
        )
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if field.name not in values and field.default is field.default_factory is MISSING:
            raise ValueError(
                f"{place}{field.name} is missing; another version of recserve wrote the file"
            )
    return kind(**{name: _parse(v, hints[name], f"{place}{name}") for name, v in values.items()})


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _parse(value: Any, hint: Any, name: str) -> Any:
    """Returns a JSON value as a value of a type. Raises ValueError."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    needed = [str(getattr(one, "__name__", one)) for one in options]
    for option in options:
        inner = get_args(option)
        if option is type(None) and value is None:
            return None
        if get_origin(option) is Literal:
            if type(value) in map(type, inner) and value in inner:
                return value
            needed[options.index(option)] = " or ".join(map(repr, inner))
        elif is_dataclass(option) and isinstance(option, type) and isinstance(value, dict):
            if len(options) == 1 or value.keys() <= _hints(option).keys():
                return parse_record(value, option, f"{name}.")
        elif get_origin(option) is tuple and isinstance(value, list | tuple):
            kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
            if len(kinds) == len(value):
                return tuple(
                    _parse(one, kind, f"{name}[{place}]")
                    for place, (one, kind) in enumerate(zip(value, kinds, strict=True))
                )
        elif option is float:
            if type(value) in (int, float) and math.isfinite(value):
                return value
            needed[options.index(option)] = "a finite number"
        elif option in (int, bool, str) and type(value) is option:
            return value
        elif get_origin(option) is dict and isinstance(value, dict):
            return {key: _parse(one, inner[1], f"{name}.{key}") for key, one in value.items()}
    raise ValueError(f"{name} is {value!r:.80}; expected {' or '.join(needed)}")


def read_arrays(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file, which has these and no others.

    Raises:
        UnreadableFile: If the file is damaged, lacks an array or has another one, or if one holds
            NaN or infinity. The message names file and array.
    """
    import numpy as np  # here, so that a command that reads no arrays starts sooner
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(regular_file(path))
    except (SafetensorError, OSError) as error:
        raise UnreadableFile(f"{path} is not a safetensors file: {error}") from error
    except AttributeError as error:  # an element type that numpy lacks
        raise UnreadableFile(f"{path} has an array of another type: {error}") from error
    if missing := sorted(set(names) - arrays.keys()):
        raise UnreadableFile(f"{path} has no array {missing[0]!r}")
    if left := sorted(arrays.keys() - set(names)):
        raise UnreadableFile(f"{path} has an array {left[0]!r} that has no place here")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UnreadableFile(f"{path}: {name} holds NaN or infinity; the file is damaged")
    return arrays


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


def set_aside(path: Path) -> Path:
    """Renames a file that cannot be used, and returns its new path. Raises OSError.

    The name ends in `.old`, or in `.old2` and so on where an earlier one has that name.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.old{number if number > 1 else ''}")).exists():
        number += 1
    path.rename(aside)
    return aside


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
