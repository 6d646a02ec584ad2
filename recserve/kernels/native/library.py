"""Builds, caches, verifies and loads the library of the compiled C sources.

A wheel carries the sources compiled for every level of instruction sets (`LEVELS`). Without a
fitting library the system's C compiler builds the sources of all operators on first use, which
takes some seconds. The result is cached in the user's cache folder. Without a compiler, or on a
processor below the lowest level, torch does the same work.

All libraries of a level give the same bits, whatever compiled them. The sources say which
operations are fused (simd.h), and the flags forbid the compiler to fuse others.

A file name contains a fingerprint of everything the code depends on, and the sha256 of the content.
So an outdated or damaged file is never loaded. A cached file is loaded only if no other user can
write to it. A packaged file is loaded only if every user who can write to it can also change the
Python code beside it.

setup.py imports this file where torch is not installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recserve.kernels.native.processor import EVERY_LEVEL, LEVELS, instruction_set

log = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
PACKAGED = HERE / "compiled"  # only in wheels
SOURCES = sorted(HERE.parent.glob("*/*.[ch]"))
FLAGS = "-O3 -std=gnu11 -fPIC -fopenmp -ffp-contract=off -fno-math-errno -Wno-psabi"


def find_compiler() -> str | None:
    """Returns the path of the C compiler (`$CC` or `cc`), or None without one."""
    return shutil.which(os.environ.get("CC", "cc"))


def load_library(compiler: str | None) -> ctypes.CDLL | None:
    """Loads the packaged library, or the cached one, or compiles it and caches it.

    Args:
        compiler: Path of the C compiler; None without one.

    Returns:
        The library. None if this processor is below every level, or if no library is packaged for
        its level and there is no compiler.

    Raises:
        OSError: If the library cannot be written or loaded.
        subprocess.CalledProcessError: If the compiler fails; `stderr` says why.
    """
    level = instruction_set()
    if level is None:
        return None
    packaged = _load_packaged(level)
    if packaged is not None or compiler is None:
        return packaged
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # A relative folder could hold code of the working directory's owner.
    cache = home / "recserve" if home.is_absolute() else None
    name = f"{level}-{fingerprint(compiler, level)}"
    cached = None if cache is None else _find(cache, name, _is_private)
    if cached is not None:
        return ctypes.CDLL(str(cached))
    log.info("compiling the C sources for %s", level)
    with tempfile.TemporaryDirectory() as folder:
        built = compile_sources(compiler, Path(folder), level)
        if cache is not None:
            _store(built, cache, name)
        return ctypes.CDLL(str(built))


def compile_sources(compiler: str, folder: Path, level: str) -> Path:
    """Compiles the sources into `folder` and returns the library.

    gcc's OpenMP runtime is not linked. torch has already loaded it, so both share its threads.
    clang calls another runtime, libomp, which is linked.

    Args:
        compiler: Path of the C compiler.
        folder: Folder for the objects and the library.
        level: Key of `LEVELS`.
    """
    flags = [*EVERY_LEVEL[level].compiler, *FLAGS.split()]
    runtime = ["-fopenmp"] if is_clang(compiler) else []
    sources = [str(source) for source in SOURCES if source.suffix == ".c"]
    objects = [f"{Path(source).stem}.o" for source in sources]
    for command in (
        [compiler, "-c", *flags, f"-I{HERE}", *sources],
        [compiler, "-shared", *objects, *runtime, "-o", "native.so"],
    ):
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return folder / "native.so"


def compile_levels(compiler: str, folder: Path) -> None:
    """Compiles a library for each level of this kind of machine, as a wheel carries them.

    Args:
        compiler: Path of the C compiler.
        folder: Folder for the libraries. It is made if there is at least one level.

    Raises:
        OSError: If a library cannot be written.
        subprocess.CalledProcessError: If the compiler fails; `stderr` says why.
    """

    def compile_level(level: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            content = compile_sources(compiler, Path(scratch), level).read_bytes()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _file_name(packaged_name(level), content)).write_bytes(content)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_level, LEVELS))


def packaged_name(level: str) -> str:
    """Returns the start of the file name of a level's library: level, and hash of its sources."""
    parts = [*map(str.encode, (*EVERY_LEVEL[level].compiler, FLAGS))]
    parts += [source.read_bytes() for source in SOURCES]
    return f"{level}-{_digest(parts)}"


def is_clang(compiler: str) -> bool:
    """Returns whether a C compiler is clang."""
    return b"clang" in _version(compiler)


def _load_packaged(level: str) -> ctypes.CDLL | None:
    """Loads the library that a wheel carries for a level, or returns None."""
    path = _find(PACKAGED, packaged_name(level), _is_like_code)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("the packaged library for %s cannot be loaded: %s", level, error)
        return None
    log.info("the C kernels are the packaged ones for %s", level)
    return library


def fingerprint(compiler: str, level: str) -> str:
    """Returns a hash of everything that the compiled code depends on.

    It covers sources, flags, level and compiler. The compiler also counts by path, size and
    modification time, because a wrapper that adds flags reports the version of the wrapped
    compiler.
    """
    found = os.stat(compiler)
    binary = f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns}"
    parts = [*map(str.encode, (FLAGS, level, binary)), _version(compiler)]
    return _digest([*parts, *(source.read_bytes() for source in SOURCES)])


def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _find(folder: Path, name: str, is_safe: Callable[[Path], bool]) -> Path | None:
    """Returns an intact library of this name, or None.

    Args:
        folder: Folder of the libraries.
        name: Start of the file name.
        is_safe: Whether folder and file are protected well enough to load what they hold.
    """
    if not folder.is_dir() or not is_safe(folder):
        return None
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if path.name != _file_name(name, content):
            log.warning("%s is damaged and is not used", path)
            if folder != PACKAGED:
                path.unlink(missing_ok=True)
        elif is_safe(path):
            return path
    return None


def _file_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()}.so"


def _store(built: Path, cache: Path, name: str) -> None:
    """Puts the library into the cache atomically: complete and synced to disk, or not at all."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(cache):
            return
        content = built.read_bytes()
        part = cache / f"{name}.{os.getpid()}"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(cache / _file_name(name, content))
        handle = os.open(cache, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        log.info("the compiled sources are not cached: %s", error)


def _is_private(path: Path) -> bool:
    """Returns whether this user owns the path and is the only one who may write to it."""
    return _may_write(path, {f"user {os.geteuid()}"})


def _is_like_code(path: Path) -> bool:
    """Returns whether all who may write to the path may also change this package's code."""
    return _may_write(path, {"user 0", f"user {os.geteuid()}", *_writers(Path(__file__))})


def _may_write(path: Path, trusted: set[str]) -> bool:
    """Returns whether only these may write to the path."""
    try:
        others = _writers(path) - trusted
    except OSError:
        return False
    if others:
        log.warning("%s can be written by others: this C library is not used", path)
    return not others


def _writers(path: Path) -> set[str]:
    """Returns who may write to a file or folder: its owner, and perhaps its group and everyone."""
    found = path.stat()
    writers = {f"user {found.st_uid}"}
    if found.st_mode & stat.S_IWGRP:
        writers.add(f"group {found.st_gid}")
    return writers | ({"everyone"} if found.st_mode & stat.S_IWOTH else set())
