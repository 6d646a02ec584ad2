"""Decoder operations on a CPU in C: products with packed weights, norms, RoPE and the gate.

torch composes a norm of seven operators and RoPE of eight. oneDNN takes ten microseconds to start
a product. With small matrices this overhead is most of a layer's time. `native_library.py` finds or
compiles the library. Without one torch does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.cpu.native_library import find_compiler, load_library
from recserve.kernels.fp8 import Stored
from recserve.kernels.reference import HeadNorms

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES, PANEL = 16, 64  # the widest vector and the panel of the C sources

P, N, FLOAT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "rms_norm": (INT, P, P, P, N, N, FLOAT),
    "silu_mul": (INT, P, P, N, N),
    "rope_write": (INT, P, P, P, P, P, P, P, N, N, N, N),
    "linear": (INT, P, P, P, P, N, N, N),
    "linear_halves": (P, P, P, P, N, N, N),
    "linear_int8": (INT, P, P, P, P, P, N, N, N),
    "int8_depth": (INT, N),
    "tree_attention": (INT, P, P, P, P, P, N, N, N, N, FLOAT, FLOAT, INT),
    "decoder_layers": (INT, P, N, P, P, N, P, P, P, P, P, N, P, N, INT, P, P),
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


def compiled() -> ctypes.CDLL:
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


def multiplies(weight: Tensor) -> bool:
    """Returns whether `Panels` can hold a weight [n, m]."""
    if not weight.is_cpu or weight.dtype not in TYPES or weight.ndim != 2 or weight.shape[1] % 2:
        return False
    return library() is not None


class Product(ctypes.Structure):
    """`Product` of functions.h."""

    _fields_ = [("panels", P), ("bias", P), ("scales", P), ("steps", N), ("size", N), ("halves", N)]


def in_panels(weight: Tensor, each: int) -> Tensor:
    """Returns a weight [n, m] as panels [ceil(n / PANEL), m / each, PANEL, each], zeros at the end.

    Args:
        weight: The weight, of any type.
        each: Numbers of an output that follow each other.
    """
    rows = F.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
    return rows.view(-1, PANEL, rows.shape[1] // each, each).transpose(1, 2).contiguous()


def padded(values: Tensor | None, size: int) -> Tensor:
    """Returns values [size], or zeros for None, as [ceil(size / PANEL) * PANEL] float32."""
    whole = torch.zeros(size + -size % PANEL)
    if values is not None:
        whole[:size] = values
    return whole


def checked_rows(x: Tensor, dtype: torch.dtype, inner: int) -> Tensor:
    """Returns rows x [..., inner] contiguous. Raises ValueError for another type or width."""
    if x.dtype != dtype or x.shape[-1] != inner:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; expected {dtype} [..., {inner}]")
    return x.contiguous()


@dataclass(frozen=True)
class Panels:
    """A weight [size, m] and its bias in the layout that the C products read.

    Attributes:
        weight: [ceil(size / PANEL), m / e, PANEL, e], where e elements take four bytes. Zero rows
            pad the last panel.
        bias: [ceil(size / PANEL) * PANEL] float32.
        size: n, the number of outputs.
    """

    weight: Tensor
    bias: Tensor
    size: int

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> Panels:
        """Packs a weight [n, m] and a bias [n]."""
        size = weight.shape[0]
        packed = in_panels(weight, 4 // weight.itemsize)
        return Panels(packed, padded(bias, size), size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the activations."""
        return self.weight.dtype

    @property
    def product(self) -> Product:
        """Struct for a C function. It holds addresses, so these panels must outlive it."""
        weight = self.weight
        return Product(
            weight.data_ptr(), self.bias.data_ptr(), None, weight.shape[1], self.size, False
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x W^T + b.

        Args:
            x: [..., m] of the weight's type.

        Returns:
            [..., size].

        Raises:
            ValueError: If x has another type or width than the weight.
        """
        steps = self.weight.shape[1]
        inner = steps * self.weight.shape[3]
        x = checked_rows(x, self.weight.dtype, inner)
        out = x.new_empty(*x.shape[:-1], self.size)
        compiled().linear(
            TYPES[x.dtype],
            x.data_ptr(),
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            out.data_ptr(),
            x.numel() // inner,
            steps,
            self.size,
        )
        return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension; x [..., E], weight [E] of x's type."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    compiled().rms_norm(
        TYPES[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [..., n] of a tensor [..., 2 n] that holds the gate first."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    compiled().silu_mul(
        TYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size
    )
    return out


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Runs `reference.rope_write` in C. D is a multiple of 2 * LANES; all tensors have one type."""
    assert isinstance(keys, Tensor) and isinstance(values, Tensor)
    rows, all_heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
    if norms is not None:
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        query = rms_norm(query, norms.query, norms.eps)
        qkv = torch.cat([query, rms_norm(key, norms.key, norms.eps), value], dim=1)
    query = qkv.new_empty(rows, heads, dim)
    qkv, cos, sin, slots = (x.contiguous() for x in (qkv, cos, sin, slots))
    compiled().rope_write(
        TYPES[qkv.dtype],
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        query.data_ptr(),
        rows,
        heads,
        kv_heads,
        dim,
    )
    return query
