"""The C sources under AddressSanitizer and UBSan; `make sanitize` runs all of their tests."""

import subprocess
import sys

import pytest

from tests.support.sanitizers import environment, missing, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]
WRONG = """
#include <string.h>
int beyond(int n) { int few[4] = {0}; return few[n]; }
void copy(void *out, const void *from, long n) { memcpy(out, from, n); }
"""
CALL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
print("sound", library.beyond(3), flush=True)
if sys.argv[2] == "beyond":
    library.beyond(4)
if sys.argv[2] == "null":
    library.copy(ctypes.addressof(ctypes.create_string_buffer(8)), None, 0)
print("unnoticed")
"""


@pytest.mark.parametrize(
    ("mistake", "words"),
    [("beyond", "out of bounds"), ("null", "null pointer passed"), ("none", None)],
)
def test_the_sanitizers_find_a_mistake(tmp_path, mistake, words):
    environ = environment(tmp_path)
    (tmp_path / "wrong.c").write_text(WRONG)
    library = str(tmp_path / "wrong.so")
    command = [environ["CC"], "-shared", "-fPIC", str(tmp_path / "wrong.c"), "-o", library]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-c", CALL, library, mistake], capture_output=True, text=True, env=environ
    )
    assert done.stdout.startswith("sound 0")
    assert ("unnoticed" in done.stdout) == (words is None)
    assert words is None or (done.returncode != 0 and words in done.stderr)


def test_the_c_sources_make_no_mistake(tmp_path):
    """A short form: layers and products, and searches over small tries."""
    tests = [
        "tests/kernels/attention/test_native_attention.py",
        "tests/kernels/decoder/test_decoder.py",
        "tests/kernels/layers/test_native_layers.py",
        "tests/kernels/linear/test_panels.py",
        "tests/kernels/trie/test_native_search.py",
    ]
    assert run([*tests, "-x", "-m", "not slow"], tmp_path) == 0
