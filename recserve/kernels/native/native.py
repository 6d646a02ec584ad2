"""The compiled C functions and their signatures.

torch composes a norm of seven operators and RoPE of eight. oneDNN takes ten microseconds to start
a product. With small matrices this overhead is most of a layer's time. `library.py` finds or
compiles the library. Without one torch does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess

import torch

from recserve.kernels.native.library import find_compiler, load_library

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES, PANEL = 16, 64  # the widest vector and the panel of the C sources

P, N, FLOAT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "rms_norm": (INT, P, P, P, N, N, FLOAT),
    "silu_mul": (INT, P, P, N, N),
    "rope_write": (INT, P, P, P, P, P, P, P, N, N, N, N),
    "linear": (INT, P, P, P, N),
    "int8_depth": (INT, N),
    "tree_attention": (INT, P, P, P, P, P, N, N, N, N, FLOAT, FLOAT, INT),
    "decoder_layers": (INT, P, N, P, P, N, P, P, P, P, P, N, P, N, INT, P, P),
    "greedy_paths": (INT, P, N, P, P, P, P, N, N, P),
    "ban_masked": (P, P, P, N, N, N),
    "move_paths": (P, P, P, P, P, N, N, N, N, N),
    "trie_search": (P,),
    "trie_layout": (P,),
    "wanted_prefixes": (P,),
    "passed_prefixes": (P,),
    "leaf_bits": (P, P, N, P, P),
    "scored_table": (N, P, P, P, N, P, P, P, P, P, P, N),
}
COUNTING = ("trie_search", "trie_layout", "wanted_prefixes", "passed_prefixes")
RETURNS = {**dict.fromkeys(COUNTING, N), "int8_depth": INT}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled functions, or None (with a log line) if no library is usable."""
    try:
        loaded = load_library(find_compiler())
        if loaded is None:
            log.warning(
                "there are no compiled C kernels for this processor, or there is no C compiler: "
                "torch computes instead, and a request takes up to twice as long"
            )
            return None
        declare(loaded)
    except (subprocess.CalledProcessError, OSError, AttributeError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("the C sources cannot be used; using the torch kernels instead: %s", reason)
        return None
    return loaded


def declare(loaded: ctypes.CDLL) -> None:
    """Sets the types of a library's functions. Raises AttributeError if one is missing."""
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, RETURNS.get(name)


def get_library() -> ctypes.CDLL:
    """Returns the library. Call it only where there is one."""
    found = library()
    assert found is not None
    threads = torch.get_num_threads()  # sets the number of OpenMP threads of the calling thread
    if has_own_threads():
        found.use_threads(threads)
    return found


@functools.cache
def has_own_threads() -> bool:
    """Returns whether the library has another OpenMP runtime than torch: that of clang."""
    return hasattr(library(), "use_threads")
