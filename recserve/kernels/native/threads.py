"""How many threads compute a forward pass on a CPU.

Threads wait for each other at the end of each parallel loop. In a small step the waits cost more
than the shared work saves, most of all where other programs use the same cores. So the number
follows from a count of operations.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SETTERS = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
SMALL = 2**25  # multiply-adds: about a millisecond of one core


@contextmanager
def threads_for(multiply_adds: int) -> Iterator[None]:
    """Computes with one thread if there are few operations, else with all threads.

    The number holds for loops that the calling thread begins, of torch and of the C kernels.
    """
    threads = torch.get_num_threads()
    setters = _setters()
    if multiply_adds >= SMALL or threads == 1:
        setters = ()
    for set_threads in setters:
        set_threads(1)
    try:
        yield
    finally:
        for set_threads in setters:
            set_threads(threads)


@functools.cache
def _setters() -> tuple[Callable[[int], object], ...]:
    """Returns the functions that set the number of threads of the calling thread, as torch has
    them: of its OpenMP, and of MKL, which has a number of its own.

    `torch.set_num_threads` would also set the number of threads that begin later.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return ()
    found = [getattr(library, name, None) for name in SETTERS]
    return tuple([function for function in found if function is not None])
