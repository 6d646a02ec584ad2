"""Runs tests with the C sources compiled for AddressSanitizer and UBSan.

    python -m tests.support.sanitizers [ARGUMENTS OF PYTEST]

Without arguments it runs the tests of the C sources. The compiler is gcc with the flags of the
sanitizers, and the library is cached in a folder of this run. The runtimes are preloaded, because
Python itself is compiled without them. The first error ends the process that made it. Leaks are not
looked for: Python and torch keep memory to their end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
RUNTIMES = ("libasan.so", "libubsan.so")
TESTS = (
    "tests/kernels/attention/test_native_attention.py",
    "tests/kernels/layers/test_native_layers.py",
    "tests/kernels/decoder",
    "tests/kernels/layers/test_native_layers.py",
    "tests/kernels/linear",
    "tests/kernels/native",
    "tests/kernels/trie",
    "tests/service/test_live_filters.py",
)
# These start compilers or sanitizers of their own.
LEFT_OUT = tuple(
    f"--ignore=tests/kernels/native/{name}.py"
    for name in ("test_native_library", "test_sanitizers")
)
# Fails if the sources are not compiled, so that torch would do their work.
CHECK = """
import os, pathlib
from recserve.kernels.native import native
assert native.library() is not None
(cached,) = pathlib.Path(os.environ["XDG_CACHE_HOME"], "recserve").glob("*.so")
assert b"__asan_init" in cached.read_bytes()
"""


def missing() -> str | None:
    """Returns why this machine cannot run the sanitizers, or None if it can."""
    if shutil.which("gcc") is None:
        return "no gcc here"
    absent = [name for name in RUNTIMES if not Path(_runtime(name)).is_file()]
    return f"gcc has no {', '.join(absent)}" if absent else None


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a process whose C sources are sanitized.

    Args:
        folder: Folder for the compiler's wrapper and the compiled library.
    """
    compiler = folder / "gcc-sanitized"
    compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec gcc {FLAGS} "$@"\n')
    compiler.chmod(0o700)
    return {
        **os.environ,
        "CC": str(compiler),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "LD_PRELOAD": " ".join(_runtime(name) for name in RUNTIMES),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "RECSERVE_KERNELS": "c",
    }


def run(arguments: list[str], folder: Path) -> int:
    """Compiles the sources and runs pytest. Returns its exit status, or 1 without a library."""
    environ = environment(folder)
    checked = subprocess.run([sys.executable, "-c", CHECK], cwd=ROOT, env=environ, check=False)
    if checked.returncode:
        return 1
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environ, check=False).returncode


def main() -> int:
    """Runs the tests that the command line names."""
    if reason := missing():
        print(f"the sanitizers cannot run: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        return run(sys.argv[1:] or [*TESTS, *LEFT_OUT], Path(folder))


def _runtime(name: str) -> str:
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
