"""The C sources under AddressSanitizer and UBSan; `make sanitize` runs all of their tests."""

import pytest

from tests.support.sanitizers import missing, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


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
