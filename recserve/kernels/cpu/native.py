"""What a decoder does on a CPU, in C: products with packed weights, and what lies between them.

Torch composes a norm of seven operators and RoPE of eight, and oneDNN takes ten microseconds to
begin a product; beside small matrices that is most of a layer's time. `native_library.py` compiles
the sources. Where there is no compiler, torch does the same.
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

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES, PANEL = 16, 64  # of the sources

P, N, FLOAT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "rms_norm": (INT, P, P, P, N, N, FLOAT),
    "silu_mul": (INT, P, P, N, N),
    "rope_write": (INT, P, P, P, P, P, P, P, N, N, N, N),
    "linear": (INT, P, P, P, P, N, N, N),
    "tree_attention": (INT, P, P, P, P, P, N, N, N, N, FLOAT, INT),
    "decoder_layers": (INT, P, N, P, P, N, P, P, P, P, P, N, P, N, INT, P, P),
    "trie_search": (P,),
    "trie_layout": (P,),
    "wanted_prefixes": (P,),
    "passed_prefixes": (P,),
    "leaf_bits": (P, P, N, P, P),
    "scored_table": (N, P, P, P, N, P, P, P, P, P, P, N),
}
RETURNS = dict.fromkeys(("trie_search", "trie_layout", "wanted_prefixes", "passed_prefixes"), N)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None, and a line in the log, where there is no usable library."""
    compiler = find_compiler()
    if compiler is None:
        log.info("no C compiler; torch does what the C sources do")
        return None
    try:
        loaded = load_library(compiler)
        for name, arguments in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, RETURNS.get(name)
    except (subprocess.CalledProcessError, OSError, AttributeError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("the C sources cannot be used; torch does the same: %s", reason)
        return None
    return loaded


def compiled() -> ctypes.CDLL:
    """The library, where `takes` or `multiplies` has said that there is one."""
    found = library()
    assert found is not None
    torch.get_num_threads()  # tells OpenMP how many this thread may use
    return found


def takes(x: Stored) -> bool:
    """Whether these functions compute on such a tensor: on a CPU, nothing being trained."""
    if not x.is_cpu or x.dtype not in TYPES or torch.is_grad_enabled():
        return False
    return library() is not None


def reads(x: Tensor) -> bool:
    """Whether these functions read such whole numbers, of tries and trees."""
    return x.is_cpu and x.dtype == torch.int64 and library() is not None


def multiplies(weight: Tensor) -> bool:
    """Whether `Panels` can hold a weight [n, m]."""
    if not weight.is_cpu or weight.dtype not in TYPES or weight.ndim != 2 or weight.shape[1] % 2:
        return False
    return library() is not None


class Product(ctypes.Structure):
    """`Product` of functions.h."""

    _fields_ = [("panels", P), ("bias", P), ("steps", N), ("size", N)]


@dataclass(frozen=True)
class Panels:
    """A weight [size, m] and a bias as products read them.

    weight [ceil(size / PANEL), m / e, PANEL, e]: e elements in four bytes, rows of zeros up to
    whole panels. bias [whole panels] float32.
    """

    weight: Tensor
    bias: Tensor
    size: int

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> Panels:
        """weight [n, m], bias [n]."""
        size, each = weight.shape[0], 4 // weight.itemsize
        rows = F.pad(weight, (0, 0, 0, -size % PANEL))
        packed = rows.view(-1, PANEL, rows.shape[1] // each, each).transpose(1, 2).contiguous()
        padded = torch.zeros(rows.shape[0])
        if bias is not None:
            padded[:size] = bias
        return Panels(packed, padded, size)

    @property
    def product(self) -> Product:
        """For a C function; by address, so these panels are to be kept as long as it is."""
        weight = self.weight
        return Product(weight.data_ptr(), self.bias.data_ptr(), weight.shape[1], self.size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., m] of the weight's type -> x W^T + b [..., size]."""
        x = x.contiguous()
        steps = self.weight.shape[1]
        inner = steps * self.weight.shape[3]
        if x.dtype != self.weight.dtype or x.shape[-1] != inner:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; {self.weight.dtype} of {inner} fit")
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
    """x / rms(x) * weight over the last dimension; x [..., E], weight [E] of the same type."""
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
    """silu(gate) * up of [..., 2 n], gate first -> [..., n]."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    compiled().silu_mul(
        TYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size
    )
    return out


def rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """`reference.rope_write`; D a multiple of twice LANES, all of one type."""
    rows, all_heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
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
