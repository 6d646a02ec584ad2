"""The cache of words that the tokenizers library keeps per thread stays small."""

import string
import subprocess
import sys
from pathlib import Path

import numpy as np

from recserve.tokenizer.tokenizer import TextTokenizer

NUM_WORDS, MOST_MIB = 6000, 16


def test_random_words_take_little_memory(tmp_path):
    """At the library's own capacity, 6,000 words take 47 MiB."""
    from tests.support.scripted_text import byte_tokenizer  # the other process needs no torch

    code = f"from {__name__} import encode_words; encode_words({str(byte_tokenizer(tmp_path))!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < MOST_MIB


def encode_words(folder):
    """Prints by how many MiB the anonymous memory of the process grows."""
    tokenizer = TextTokenizer.open(Path(folder))
    letters = np.random.default_rng(0).choice(list(string.ascii_lowercase), (NUM_WORDS, 250))
    words = ["".join(word) for word in letters]
    tokenizer.encode(words[0])
    before = anonymous_mib()
    for word in words:
        tokenizer.encode(word)
    print(anonymous_mib() - before)


def anonymous_mib():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
