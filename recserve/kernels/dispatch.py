"""Selects the implementation of each kernel: Triton on CUDA, C or torch on a CPU.

On a CPU C computes what it supports, and torch computes the rest. `cpu/products.py` has the rule of
the products. The environment variable `RECSERVE_KERNELS` overrides the selection:

- `c` runs everything that C supports in C, also bfloat16 products on a processor with AMX.
- `torch` runs the plain torch references on CUDA and on a CPU, to check a suspected kernel.
- `triton` runs the Triton kernels everywhere, interpreted, in tests.

Functions import Triton locally, because machines without a GPU do not install it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels import accept_reference, reference
from recserve.kernels.accept_reference import DraftProbs, Keys, Walk
from recserve.kernels.cpu import native, products
from recserve.kernels.cpu.cpu_attention import CpuTreeAttention
from recserve.kernels.fp8 import Stored
from recserve.kernels.paged_kv import PrefixTable, TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation, HeadNorms, HeadTopK
from recserve.kernels.tree import TokenTree

LayerAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BatchAttention = Callable[[TreeBatch, Activation], LayerAttention]

PATHS = ("auto", "c", "torch", "triton")
KERNELS = os.environ.get("RECSERVE_KERNELS", "auto")
if KERNELS not in PATHS:
    raise ValueError(f"RECSERVE_KERNELS is {KERNELS!r}; choose one of {PATHS}")


def in_triton(x: Stored) -> bool:
    """Returns whether kernels on this tensor run in Triton."""
    return x.is_cuda if KERNELS in ("auto", "c") else KERNELS == "triton"


def uses_c() -> bool:
    """Returns whether C implementations may be used."""
    return KERNELS in ("auto", "c")


def in_native(x: Stored) -> bool:
    """Returns whether kernels on this tensor run in C: on a CPU with a compiler, not training."""
    return uses_c() and native.takes(x)


def lays_out(keys: Tensor) -> bool:
    """Returns whether sets of trie nodes [n] become token trees in C (trie/native.py)."""
    return uses_c() and native.reads(keys)


def packs(weight: Tensor, stored: products.PackedFormat | None = None) -> bool:
    """Returns whether the product with a weight [n, m] runs in C (`products.runs_in_c`)."""
    return uses_c() and products.runs_in_c(weight, stored, forced=KERNELS == "c")


def turns(pool: Stored) -> bool:
    """Returns whether `rope_write` is a single pass for a pool [..., D]."""
    if in_triton(pool):
        return True
    return in_native(pool) and pool.shape[-1] % (2 * native.LANES) == 0


def tree_attention(batch: TreeBatch, activation: Activation = SOFTMAX) -> LayerAttention:
    """Prepares the attention of one batch; the result is called once per layer.

    A CPU uses the planned CPU path and CUDA the Triton kernel. Training uses
    `reference.tree_attention`, which has gradients. A CPU computes roots given as a table with the
    reference.

    Args:
        batch: Trees of one forward pass.
        activation: Softmax, or SiLU with a constant normaliser.

    Returns:
        A function (query, key, value, keys, values) -> [Tq, H, D]. query [Tq, H, D], key and value
        [Tq, K, D] belong to the computed nodes. keys and values [slots, K, D] are one layer of the
        pool, with the computed nodes already written.
    """
    if in_triton(batch.slots):
        from recserve.kernels.triton.tree_attention import TritonTreeAttention

        return TritonTreeAttention(batch, activation)
    if isinstance(batch.prefix_slots, PrefixTable):
        return lambda query, key, value, keys, values: reference.padded_tree_attention(
            query, keys, values, batch
        )
    if not batch.slots.is_cuda:
        return CpuTreeAttention(batch, activation, native=uses_c())

    def plain(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return reference.tree_attention(query, keys, values, batch, activation)

    return plain


def accept(
    logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor, max_depth: int
) -> Walk:
    """Runs `accept_reference.accept` with the selected kernel."""
    if not in_triton(logits):
        return accept_reference.accept(logits, tree, keys, temperatures, max_depth)
    from recserve.kernels.triton import accept as kernel

    return kernel.accept(logits, tree, keys, temperatures, max_depth)


def accept_drawn(p: Tensor, q: DraftProbs, tree: TokenTree, keys: Keys, max_depth: int) -> Walk:
    """Runs `accept_reference.accept_drawn` with the selected kernel."""
    if not in_triton(p):
        return accept_reference.accept_drawn(p, q, tree, keys, max_depth)
    from recserve.kernels.triton import accept_drawn as kernel

    return kernel.accept_drawn(p, q, tree, keys, max_depth)


def move_paths(
    keys: Stored, values: Stored, sources: Tensor, targets: Tensor, lengths: Tensor
) -> None:
    """Runs `reference.move_paths` with the selected kernel."""
    if not in_triton(keys):
        return reference.move_paths(keys, values, sources, targets, lengths)
    from recserve.kernels.triton import path_move

    return path_move.move_paths(keys, values, sources, targets, lengths)


def fuses(x: Tensor) -> bool:
    """Returns whether the small operations of layers on x run fused: in Triton, not training."""
    return in_triton(x) and not torch.is_grad_enabled()


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Runs `reference.rope_write` with the selected kernel. C takes no norms."""
    alike = qkv.dtype == keys.dtype and in_native(qkv) and turns(keys)
    if norms is None and alike and isinstance(keys, Tensor) and isinstance(values, Tensor):
        return native.rope_write(qkv, cos, sin, slots, keys, values)
    if not in_triton(qkv):
        return reference.rope_write(qkv, cos, sin, slots, keys, values, norms)
    from recserve.kernels.triton import rope_write as kernel

    return kernel.rope_write(qkv, cos, sin, slots, keys, values, norms)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension, in x's dtype.

    Args:
        x: [..., E].
        weight: [E].
        eps: Added to the mean square.
    """
    if in_native(x) and weight.dtype == x.dtype:
        return native.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + y, and its RMSNorm, both [..., E] in x's dtype.

    Args:
        x: [..., E].
        y: [..., E] in x's dtype.
        weight: [E].
        eps: Added to the mean square.
    """
    if fuses(x):
        from recserve.kernels.triton import layer_norm

        return layer_norm.add_rms_norm(x, y, weight, eps)
    total = x + y
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [..., n] of a tensor [..., 2 n] that holds the gate first."""
    if in_native(gate_up):
        return native.silu_mul(gate_up)
    if fuses(gate_up):
        from recserve.kernels.triton import layer_norm

        return layer_norm.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def head_topk(hidden: Tensor, weight: Tensor, k: int) -> HeadTopK:
    """Runs `reference.head_topk` with the selected kernel."""
    if not in_triton(hidden):
        return reference.head_topk(hidden, weight, k)
    from recserve.kernels.triton import head_topk as kernel

    return kernel.head_topk(hidden, weight, k)
