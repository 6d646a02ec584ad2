"""Who computes: Triton on CUDA, C or torch on a CPU; and operators with one function for each.

On a CPU C computes what it supports, and torch computes the rest. `linear/products.py` has the rule
of the products. The environment variable `RECSERVE_KERNELS` overrides the choice:

- `c` is the default on a CPU: everything that C supports runs in C.
- `torch` runs the plain torch references on CUDA and on a CPU, to check a suspected kernel.
- `triton` runs the Triton kernels everywhere, interpreted, in tests.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from recserve.kernels.native import native

P = ParamSpec("P")
R = TypeVar("R")

CHOICES = ("auto", "c", "torch", "triton")
FORCED = os.environ.get("RECSERVE_KERNELS", "auto")
if FORCED not in CHOICES:
    raise ValueError(f"RECSERVE_KERNELS is {FORCED!r}; choose one of {CHOICES}")


class HasDevice(Protocol):
    """What tells who computes: a tensor, or vectors in 8 bits."""

    @property
    def is_cpu(self) -> bool:
        """Whether it is in the host's memory."""
        ...

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of its numbers."""
        ...


class Backend(enum.Enum):
    """What computes on a tensor."""

    TRITON = "triton"
    C = "c"
    TORCH = "torch"


def backend_of(x: HasDevice) -> Backend:
    """Returns who computes on a tensor.

    C needs a CPU, a compiled library, and integers of a trie or numbers of a supported type. It
    has no gradients.
    """
    if FORCED == "triton" or (x.is_cuda and FORCED != "torch"):
        return Backend.TRITON
    if FORCED == "torch" or not x.is_cpu:
        return Backend.TORCH
    whole = x.dtype in (torch.int32, torch.int64)
    in_c = whole or (x.dtype in native.TYPES and not torch.is_grad_enabled())
    return Backend.C if in_c and native.library() is not None else Backend.TORCH


def c_is_allowed() -> bool:
    """Returns whether `RECSERVE_KERNELS` leaves a CPU to C."""
    return FORCED in ("auto", "c")


def _first(*args: Any, **kwargs: Any) -> HasDevice:
    first: Tensor = args[0]
    return first


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


@dataclass(frozen=True)
class Operator(Generic[P, R]):
    """An operator: a reference in torch, and kernels with the same arguments and results.

    Attributes:
        reference: The operator in plain torch, on any device.
        c: The same in C, or None.
        c_supports: Whether C supports these arguments.
        triton: The same in Triton as "module:function", imported at the first call because
            machines without a GPU do not install Triton. None without one.
        trains: Whether the reference runs where gradients are enabled, because the Triton kernel
            has none.
        reads: Returns the tensor that decides who computes.
    """

    reference: Callable[P, R]
    c: Callable[P, R] | None = None
    c_supports: Callable[P, bool] = _always
    triton: str | None = None
    trains: bool = False
    reads: Callable[P, HasDevice] = _first

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel of the backend, or the reference where it has none."""
        backend = backend_of(self.reads(*args, **kwargs))
        if backend is Backend.TRITON and self.triton is not None:
            if not (self.trains and torch.is_grad_enabled()):
                kernel: Callable[P, R] = resolve_name(self.triton)
                return kernel(*args, **kwargs)
        elif backend is Backend.C and self.c is not None and self.c_supports(*args, **kwargs):
            return self.c(*args, **kwargs)
        return self.reference(*args, **kwargs)
