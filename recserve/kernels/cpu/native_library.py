"""Builds, caches, verifies and loads the library of the compiled C sources.

The system's C compiler builds the sources in this folder on first use, which takes two seconds. The
result is cached in the user's cache folder. The file name contains a fingerprint of everything the
code depends on, and the sha256 of the content. A file is loaded only if its content has this hash
and only this user can write to it. Without a compiler torch does the same work.
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
from pathlib import Path

from recserve.kernels.cpu.processor import instruction_set, processor

log = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
FLAGS = "-O3 -std=gnu11 -fPIC -fopenmp -ffp-contract=fast -fno-math-errno -Wno-psabi"


def find_compiler() -> str | None:
    """Returns the path of the C compiler (`$CC` or `cc`), or None without one."""
    return shutil.which(os.environ.get("CC", "cc"))


def load_library(compiler: str) -> ctypes.CDLL:
    """Loads the cached library, or compiles it and caches it if the folder is writable.

    Args:
        compiler: Path of the C compiler.

    Raises:
        OSError: If the library cannot be written or loaded.
        subprocess.CalledProcessError: If the compiler fails; `stderr` says why.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # A relative folder could hold code of the working directory's owner.
    cache = home / "recserve" if home.is_absolute() else None
    name = f"native-{fingerprint(compiler)}"
    cached = None if cache is None else _find(cache, name)
    if cached is not None:
        return ctypes.CDLL(str(cached))
    log.info("compiling the C sources for %s", instruction_set())
    with tempfile.TemporaryDirectory() as folder:
        built = compile_sources(compiler, Path(folder))
        if cache is not None:
            _store(built, cache, name)
        return ctypes.CDLL(str(built))


def compile_sources(compiler: str, folder: Path) -> Path:
    """Compiles the sources into `folder` and returns the library.

    OpenMP is not linked. torch has already loaded its runtime, so both share its threads.
    """
    flags = [f"-march={instruction_set()}", *FLAGS.split()]
    sources = [str(source) for source in SOURCES if source.suffix == ".c"]
    objects = [f"{Path(source).stem}.o" for source in sources]
    for command in (
        [compiler, "-c", *flags, *sources],
        [compiler, "-shared", *objects, "-o", "native.so"],
    ):
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return folder / "native.so"


def fingerprint(compiler: str) -> str:
    """Returns a hash of everything that the compiled code depends on.

    It covers sources, flags, processor and compiler. The compiler also counts by path, size and
    modification time, because a wrapper that adds flags reports the version of the wrapped
    compiler.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    found = os.stat(compiler)
    binary = f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns}"
    about = (FLAGS, instruction_set(), binary, processor().name, *sorted(processor().flags))
    parts = [*map(str.encode, about), version, *(source.read_bytes() for source in SOURCES)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _find(cache: Path, name: str) -> Path | None:
    """Returns an intact library of this name in a private folder, or None."""
    if not _is_private(cache):
        return None
    for path in sorted(cache.glob(f"{name}-*.so")):
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
        if path.name != f"{name}-{digest}.so":
            log.warning("%s is damaged; compiling the C sources again", path)
            path.unlink(missing_ok=True)
        elif _is_private(path):
            return path
    return None


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
        part.replace(cache / f"{name}-{hashlib.sha256(content).hexdigest()}.so")
        handle = os.open(cache, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        log.info("the compiled sources are not cached: %s", error)


def _is_private(path: Path) -> bool:
    """Returns whether this user owns the path and is the only one who may write to it."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        found = path.stat()
    if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    log.warning("%s can be written by others: the cached C library is not used", path)
    return False
