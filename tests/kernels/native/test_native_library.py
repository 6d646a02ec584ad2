"""Where the C library comes from: a damaged, foreign or outdated file is never loaded."""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from recserve.kernels.native import library as native_library
from recserve.kernels.native import native
from recserve.kernels.native import processor as processor_module
from recserve.kernels.native.processor import LEVELS, best_level, instruction_set, processor
from tests.support.grids import chosen
from tests.support.paths import ROOT

COMPILER = native_library.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The library of this process, or the sources compiled once for this file."""
    library = native.library()
    if library is not None and Path(library._name).is_file():
        return Path(library._name)
    level = instruction_set()
    if level is None:
        pytest.skip("no level of instruction sets is known for this machine")
    return native_library.compile_sources(COMPILER, tmp_path_factory.mktemp("built"), level)


@pytest.fixture
def cache(tmp_path, monkeypatch, built):
    """A cache folder of its own, and a compiler that only counts and copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_sources(compiler: str, folder: Path, level: str) -> Path:
        compiled.append(compiler)
        library = folder / "native.so"
        library.write_bytes(built.read_bytes())
        return library

    monkeypatch.setattr(native_library, "compile_sources", compile_sources)
    folder = tmp_path / "recserve"
    return folder, compiled


@pytest.fixture
def packaged(tmp_path, monkeypatch, built):
    """The library that a wheel would carry for this processor."""
    level = instruction_set()
    assert level is not None
    folder = tmp_path / "compiled"
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(native_library, "PACKAGED", folder)
    return put(folder, native_library.packaged_name(level), built.read_bytes())


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()}.so"
    path.write_bytes(content)
    path.chmod(0o644)
    return path


def load() -> ctypes.CDLL:
    library = native_library.load_library(COMPILER)
    assert library is not None
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


def test_a_packaged_library_needs_no_compiler_and_no_cache(packaged, cache, monkeypatch):
    folder, compiled = cache
    monkeypatch.setattr(native_library, "fingerprint", None)  # it would ask the compiler
    assert load()._name == str(packaged)
    library = native_library.load_library(None)
    assert library is not None and library._name == str(packaged)
    assert not compiled and not folder.exists()


@pytest.mark.parametrize("change", ["SOURCES", "FLAGS"])
def test_a_library_of_other_sources_or_flags_is_not_loaded(
    packaged, cache, monkeypatch, tmp_path, change
):
    if change == "SOURCES":
        edited = tmp_path / native_library.SOURCES[0].name
        edited.write_bytes(native_library.SOURCES[0].read_bytes() + b"\n")
        monkeypatch.setattr(native_library, "SOURCES", [edited, *native_library.SOURCES[1:]])
    else:
        monkeypatch.setattr(native_library, "FLAGS", f"{native_library.FLAGS} -O2")
    assert native_library.load_library(None) is None
    assert load()._name != str(packaged)
    assert packaged.exists() and len(cache[1]) == 1


@pytest.mark.parametrize("content", [b"", b"not a library"])
@pytest.mark.parametrize("fits", [False, True])
def test_a_damaged_packaged_library_is_left_alone_and_the_sources_compiled(
    packaged, cache, content, fits, caplog
):
    packaged.write_bytes(content)
    if fits:  # the hash of the content does not tell, but the system cannot load it
        packaged.unlink()
        packaged = put(packaged.parent, packaged.name.rpartition("-")[0], content)
    assert native_library.load_library(None) is None
    load()
    assert packaged.exists() and len(cache[1]) == 1
    assert ("cannot be loaded" if fits else "is damaged") in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("which", ["folder", "file"])
def test_a_packaged_library_that_more_may_write_than_the_code_is_not_loaded(
    packaged, cache, monkeypatch, which, mode, caplog, tmp_path
):
    code = tmp_path / "native_library.py"
    code.write_text("")
    code.chmod(0o644)
    monkeypatch.setattr(native_library, "__file__", str(code))
    (packaged.parent if which == "folder" else packaged).chmod(mode)
    assert native_library.load_library(None) is None
    assert "can be written by others" in caplog.text
    load()
    assert len(cache[1]) == 1
    # Whoever may change the code may also change the library.
    code.chmod(mode)
    library = native_library.load_library(None)
    assert library is not None and library._name == str(packaged)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_packaged_library_belongs_to_the_owner_of_the_code(
    packaged, cache, monkeypatch, tmp_path
):
    code = tmp_path / "native_library.py"
    code.write_text("")
    monkeypatch.setattr(native_library, "__file__", str(code))
    os.chown(packaged, 65534, 65534)
    assert native_library.load_library(None) is None
    os.chown(code, 65534, 65534)
    assert native_library.load_library(None) is not None


def test_the_best_level_is_the_highest_whose_flags_are_there(monkeypatch):
    levels = processor_module.LEVELS_OF_MACHINES["x86_64"]
    monkeypatch.setattr(processor_module, "LEVELS", levels)
    flags: set[str] = set()
    for level, added in levels.items():
        for flag in sorted(added.flags):
            assert best_level_with(flags, monkeypatch) != level
            flags.add(flag)
        assert best_level_with(flags, monkeypatch) == level
    assert best_level_with({"asimd"}, monkeypatch) is None


def best_level_with(flags: set[str], monkeypatch) -> str | None:
    found = processor_module.Processor("", frozenset(flags))
    monkeypatch.setattr(processor_module, "processor", lambda: found)
    return best_level()


def test_the_build_of_a_wheel_needs_no_installed_package():
    code = "from recserve.kernels.native import library as n; print(len(n.SOURCES), n.PACKAGED)"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    number, folder = ran.stdout.split()
    assert int(number) == len(native_library.SOURCES)
    assert Path(folder).parent == Path(native_library.__file__).parent


def test_the_fingerprint_counts_the_compiler_itself_and_the_instruction_set(tmp_path):
    wrappers = []
    for number, flag in enumerate(["-O1", "-O2"]):
        path = tmp_path / f"cc{number}"
        path.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" {flag}\n')
        path.chmod(0o755)
        wrappers.append(native_library.fingerprint(str(path), "x86-64-v3"))
    others = [native_library.fingerprint(COMPILER, level) for level in ("x86-64-v3", "x86-64-v4")]
    assert len({*wrappers, *others}) == 4


def test_a_library_without_a_function_is_refused(monkeypatch, tmp_path):
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    library = tmp_path / "empty.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setattr(native, "load_library", lambda compiler: ctypes.CDLL(str(library)))
    assert native.library.__wrapped__() is None


@pytest.mark.parametrize("level", chosen(tuple(LEVELS), *list(LEVELS)[:1]))
def test_the_instruction_set_can_be_lowered_or_says_what_is_missing(level):
    """In a process of its own, as `RECSERVE_ISA` is read when the library is first loaded."""
    below = list(LEVELS)[: list(LEVELS).index(level) + 1]
    needed = {flag for name in below for flag in LEVELS[name].flags}
    code = "from recserve.kernels.native import native; print(native.library() is not None)"
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
    with pytest.raises(ValueError, match="RECSERVE_ISA is 'avx9'; choose one of .*leave it unset"):
        instruction_set()


def test_the_best_level_is_compiled_for_and_not_the_processor(monkeypatch):
    monkeypatch.delenv("RECSERVE_ISA", raising=False)
    assert instruction_set() == best_level()
    for level in LEVELS:
        assert not {"native", "-march=native"} & {*LEVELS[level].compiler}


def test_below_the_lowest_level_torch_computes(monkeypatch):
    monkeypatch.delenv("RECSERVE_ISA", raising=False)
    found = processor_module.Processor("", frozenset({"sse4_2", "avx"}))
    monkeypatch.setattr(processor_module, "processor", lambda: found)
    assert native_library.load_library(COMPILER) is None


@pytest.mark.slow
def test_a_library_of_clang_has_as_many_threads_as_torch(tmp_path):
    """In a process of its own: it loads a second OpenMP runtime."""
    if shutil.which("clang") is None:
        reason = "clang's threads are NOT tested: there is no clang here"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    code = """
import os, torch
from recserve.kernels.linear.panels import Panels
from recserve.kernels.native import native
packed = Panels.of(torch.ones(4096, 512), None)
for threads in (1, 2):
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for _ in range(20):
            packed(torch.ones(8, 512))
    print(native.has_own_threads(), len(os.listdir("/proc/self/task")))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CC": "clang", "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert ran[0] == ran[2] == "True"
    assert int(ran[3]) == int(ran[1]) + 1
