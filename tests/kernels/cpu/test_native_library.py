"""How the compiled C sources are cached: a damaged, foreign or outdated file is never loaded."""

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from recserve.kernels.cpu import native, native_library
from recserve.kernels.cpu.processor import LEVELS, instruction_set, processor
from tests.support.grids import chosen

COMPILER = native_library.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The library of this process, or the sources compiled once for this file."""
    library = native.library()
    if library is not None and Path(library._name).is_file():
        return Path(library._name)
    return native_library.compile_sources(COMPILER, tmp_path_factory.mktemp("built"))


@pytest.fixture
def cache(tmp_path, monkeypatch, built):
    """A cache folder of its own, and a compiler that only counts and copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_sources(compiler: str, folder: Path) -> Path:
        compiled.append(compiler)
        library = folder / "native.so"
        library.write_bytes(built.read_bytes())
        return library

    monkeypatch.setattr(native_library, "compile_sources", compile_sources)
    folder = tmp_path / "recserve"
    return folder, compiled


def load() -> ctypes.CDLL:
    library = native_library.load_library(COMPILER)
    assert all(hasattr(library, name) for name in native.SIGNATURES)
    return library


def test_a_compiled_library_is_cached_for_this_user_alone(cache):
    folder, compiled = cache
    load()
    load()
    assert len(compiled) == 1
    (kept,) = folder.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["empty", "cut in the first page", "cut", "a flipped bit"])
def test_a_damaged_library_is_compiled_again(cache, damage):
    folder, compiled = cache
    load()
    (kept,) = folder.iterdir()
    content = bytearray(kept.read_bytes())
    if damage == "a flipped bit":
        content[len(content) // 2] ^= 1
    else:
        del content[{"empty": 0, "cut in the first page": 100, "cut": 60_000}[damage] :]
    # A new file under the name: the old one is mapped into this process.
    kept.unlink()
    kept.write_bytes(content)
    kept.chmod(0o700)
    load()
    assert len(compiled) == 2
    assert [path.name for path in folder.iterdir()] == [kept.name]


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(cache, which, mode, caplog):
    folder, compiled = cache
    load()
    (kept,) = folder.iterdir()
    (folder if which == "folder" else kept).chmod(mode)
    load()
    assert len(compiled) == 2
    assert "can be written by others" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_library_of_another_user_is_not_loaded(cache):
    folder, compiled = cache
    load()
    (kept,) = folder.iterdir()
    os.chown(kept, 65534, 65534)
    load()
    assert len(compiled) == 2


def test_a_relative_or_unusable_cache_folder_is_not_used(cache, tmp_path, monkeypatch):
    folder, compiled = cache
    load()
    (kept,) = folder.iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # a file where a folder should be
    load()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", ".")
    load()
    assert len(compiled) == 3
    assert list(folder.iterdir()) == [kept]


def test_the_fingerprint_counts_the_compiler_itself_and_the_instruction_set(tmp_path, monkeypatch):
    wrappers = []
    for number, flag in enumerate(["-O1", "-O2"]):
        path = tmp_path / f"cc{number}"
        path.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" {flag}\n')
        path.chmod(0o755)
        wrappers.append(native_library.fingerprint(str(path)))
    monkeypatch.setenv("RECSERVE_ISA", "x86-64" if instruction_set() != "x86-64" else "native")
    lowered = native_library.fingerprint(COMPILER)
    monkeypatch.undo()
    assert len({*wrappers, lowered, native_library.fingerprint(COMPILER)}) == 4


def test_a_library_without_a_function_is_refused(monkeypatch, tmp_path):
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    library = tmp_path / "empty.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setattr(native, "load_library", lambda compiler: ctypes.CDLL(str(library)))
    assert native.library.__wrapped__() is None


@pytest.mark.parametrize("level", chosen(tuple(LEVELS), "x86-64"))
def test_the_instruction_set_can_be_lowered_or_says_what_is_missing(level):
    """In a process of its own, as `RECSERVE_ISA` is read when the library is first loaded."""
    needed = {
        flag for name in list(LEVELS)[: list(LEVELS).index(level) + 1] for flag in LEVELS[name]
    }
    code = "from recserve.kernels.cpu import native; print(native.library() is not None)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RECSERVE_ISA": level},
        capture_output=True,
        text=True,
    )
    if needed <= processor().flags:
        assert ran.stdout.strip() == "True", ran.stderr
    else:
        assert ran.returncode and "this processor lacks" in ran.stderr


def test_an_unknown_instruction_set_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("RECSERVE_ISA", "avx9")
    with pytest.raises(ValueError, match="RECSERVE_ISA is 'avx9'; choose one of .*x86-64-v3"):
        instruction_set()
