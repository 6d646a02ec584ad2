"""The C sources against plain loops in C, also for processors that this machine does not have.

The sources are compiled for arm64 by a cross compiler and run in an emulator. On Debian the
packages are gcc-aarch64-linux-gnu and qemu-user.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from recserve.kernels.native import library, native
from recserve.kernels.native.processor import LEVELS, missing_flags

pytestmark = pytest.mark.slow
SELF_TEST = Path(__file__).with_name("self_test.c")
CROSS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")
KERNELS = {"product", "int8 product", "half product", "attention", "norm", "gate"}


def build(compiler: str, folder: Path, *flags: str) -> Path:
    sources = [str(source) for source in library.SOURCES if source.suffix == ".c"]
    program = folder / "self_test"
    everything = [*library.FLAGS.split(), *flags, f"-I{library.HERE}"]
    command = [compiler, *everything, *sources, str(SELF_TEST), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def check(*command: str, lanes: int) -> None:
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert good.stdout.endswith(f" comparisons, 0 failed, {lanes} lanes\n")
    assert int(good.stdout.split()[0]) > 100_000
    wrong = subprocess.run([*command, "wrong"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert {line.partition(",")[0] for line in wrong.stderr.splitlines()} == KERNELS


def test_arm64_computes_what_plain_loops_compute(tmp_path):
    missing = [name for name in CROSS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"the arm64 kernels are NOT tested: no {' and no '.join(missing)} here")
    compiler, emulator = CROSS
    program = build(compiler, tmp_path, "-march=armv8-a", "-static")
    check(emulator, str(program), lanes=4)


@pytest.mark.skipif(native.library() is None, reason="no C compiler here")
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_computes_what_plain_loops_compute(level, tmp_path):
    program = build(library.find_compiler(), tmp_path, *LEVELS[level].compiler)
    if missing_flags(level):
        pytest.skip(f"compiled but NOT run: this processor lacks {', '.join(missing_flags(level))}")
    lanes = {"x86-64-v3": 8, "armv8-a": 4}.get(level, 16)
    check(str(program), lanes=lanes)
