"""Folders that are made once and shared by all processes of the tests: bundles, trained networks.

A folder is named by everything that may change its content: all sources of the package and of
`tests/support`, the file of its recipe, the versions of Python and torch, the processor's level and
the variables that choose kernels. So no test sees the folder of other sources. A copy of the
repository has folders of its own.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

import torch

from tests.support.paths import ROOT

FOLDER = ROOT / "build" / "shared-by-tests"
KEPT = 6  # sets of folders: one for each state of the sources or tier that is in use
VARIABLES = ("RECSERVE_ISA", "RECSERVE_KERNELS", "CC", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")

_shared: dict[Path, str] = {}


def shared_folder(name: str, make: FunctionType) -> Path:
    """Returns a folder that `make` fills once for all processes. It must not be changed.

    Args:
        name: Name of the folder, with the arguments of its recipe.
        make: Fills an empty folder.

    Raises:
        RuntimeError: If a test has changed the folder.
    """
    recipe = Path(make.__code__.co_filename).read_bytes()
    digest = hashlib.sha256(recipe).hexdigest()[:8]
    folder = _set_folder() / f"{name}-{digest}"
    listing = folder.with_suffix(".json")
    if folder not in _shared:
        with _lock(folder.with_suffix(".lock")):
            if not listing.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that was ended
                folder.mkdir()
                make(folder)
                listing.write_text(_list(folder), encoding="utf-8")
        _shared[folder] = listing.read_text(encoding="utf-8")
        _check(folder)
    return folder


def check_shared_folders() -> None:
    """Raises RuntimeError if a folder that this process uses has changed since it was made."""
    for folder in _shared:
        _check(folder)


def _check(folder: Path) -> None:
    before, after = json.loads(_shared[folder]), json.loads(_list(folder))
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    if changed:
        folder.with_suffix(".json").unlink(missing_ok=True)  # it is made anew
        raise RuntimeError(f"a test changed {changed[:5]} of {folder}, which all tests share")


def _list(folder: Path) -> str:
    """Returns the files of a folder with their sizes and times of change."""
    stats = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    own = {str(p.relative_to(folder)): [s.st_size, s.st_mtime_ns] for p, s in stats.items()}
    return json.dumps(own)


@functools.cache
def _set_folder() -> Path:
    """Returns the folder of these sources, and removes the oldest of other sources."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    own = FOLDER / _digest_sources()
    with _lock(FOLDER / ".lock"):
        own.mkdir(exist_ok=True)
        os.utime(own)
        sets = sorted((p for p in FOLDER.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
        for old in sets[:-KEPT]:
            shutil.rmtree(old)
    return own


@functools.cache
def _digest_sources() -> str:
    digest = hashlib.sha256()
    about = [sys.version, torch.__version__, torch.backends.cpu.get_cpu_capability()]
    about += [platform.machine(), *(os.environ.get(name, "") for name in VARIABLES)]
    digest.update("\n".join(about).encode())
    for folder in ("recserve", "tests/support"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
