"""The bits of every C function do not depend on the compiler, its tuning or its optimisation."""

import functools
import os
import shutil
import subprocess
import sys

import pytest

from recserve.kernels.native import library as native_library
from recserve.kernels.native import native
from recserve.kernels.native.processor import LEVELS, instruction_set, missing_flags
from tests.support.c_results import GOLDEN, c_results, digest
from tests.support.paths import ROOT

HERE = [level for level in LEVELS if not missing_flags(level)]
COMPILERS = {
    "gcc-O1": ["-O1"],
    "clang-sapphirerapids": ["-O3", "-mtune=sapphirerapids"],
    "gcc-O2-skylake": ["-O2", "-mtune=skylake"],
    "clang-O1-znver3": ["-O1", "-mtune=znver3"],
    "gcc-sapphirerapids": ["-O3", "-mtune=sapphirerapids"],
    "clang-O2-skylake": ["-O2", "-mtune=skylake"],
}
if "x86-64-v3" not in LEVELS:
    COMPILERS = {name: flags[:1] for name, flags in COMPILERS.items()}


# Each level meets both compilers where there are three. One compilation takes ten seconds.
CASES = [(HERE[number % len(HERE)], name) for number, name in enumerate(COMPILERS) if HERE]


@functools.cache
def expected(level: str) -> str | None:
    """The recorded digest, or that of this process's library where it is of this level."""
    if level in GOLDEN:
        return GOLDEN[level]
    if native.library() is not None and instruction_set() == level:
        return digest(c_results())
    return None


@pytest.mark.skipif(native.library() is None, reason="no C kernels here")
def test_the_library_of_this_process_has_the_recorded_bits():
    level = instruction_set()
    if level not in GOLDEN:
        pytest.skip(f"NOT compared: no digest is recorded for {level}")
    assert digest(c_results()) == GOLDEN[level]


@pytest.mark.slow
@pytest.mark.skipif(native_library.find_compiler() is None, reason="no C compiler here")
@pytest.mark.parametrize("level, name", CASES)
def test_a_compiler_and_its_flags_change_no_bit(level, name, tmp_path):
    compiler, flags = name.partition("-")[0], COMPILERS[name]
    if shutil.which(compiler) is None:
        reason = f"the bits of {name} are NOT compared: there is no {compiler} here"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    wrapper = tmp_path / compiler  # the last -O and -mtune of a command line count
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which(compiler)} "$@" {" ".join(flags)}\n')
    wrapper.chmod(0o755)
    library = native_library.compile_sources(str(wrapper), tmp_path, level)
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.c_results", str(library)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    if (recorded := expected(level)) is not None:
        assert found == ["native.so", recorded]
    else:
        pytest.skip(f"NOT compared: no digest is recorded for {level}")
