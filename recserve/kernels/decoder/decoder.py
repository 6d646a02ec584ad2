"""All layers of a decoder in one call, for few rows on a CPU.

A product of one row takes microseconds. Going from one operator to the next takes twice as long,
because the caches are full of weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.linear.panels import LinearStruct, Panels
from recserve.kernels.native.native import FLOAT, TYPES, N, P, get_library


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer; norms and panels have one type, or the panels are in 8 bits.

    Attributes:
        attention_norm: [E].
        query_norm: [D], or None without a query norm.
        key_norm: [D], or None without a key norm.
        mlp_norm: [E].
        qkv: Query, key and value projections.
        output: Output projection of the attention.
        gate_up: Gate and up projections.
        down: Down projection.
    """

    attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    qkv: Panels
    output: Panels
    gate_up: Panels
    down: Panels


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder layer.

    Attributes:
        size: E, hidden size.
        heads: H, query heads.
        kv_heads: K.
        dim: D, head dimension.
        inner: Width of the gate.
        eps: Added to the mean square in norms.
    """

    size: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    eps: float

    @property
    def scratch(self) -> int:
        """Numbers of scratch memory per row for intermediate results."""
        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        return self.size + qkv + 2 * self.heads * self.dim + 3 * self.inner


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, N) for name in ("size", "heads", "kv_heads", "dim", "inner")),
        ("eps", FLOAT),
        ("scale", FLOAT),
    ]


class NativeLayers:
    """All layers of one decoder, and its final norm."""

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, shape: LayerShape) -> None:
        """Collects the addresses of the weights.

        Args:
            layers: Weights of each layer.
            norm: [E] weight of the final norm, of the layers' type.
            shape: Sizes of every layer. D is a multiple of 2 * LANES.
        """
        # C reads these by address, so they must live as long as this object.
        self.shape, self._read, self._norm = shape, tuple(layers), norm
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        s = shape
        self._shape = _Shape(s.size, s.heads, s.kv_heads, s.dim, s.inner, s.eps, s.dim**-0.5)

    def __call__(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        slots: Tensor,
        pool: tuple[Tensor, Tensor],
        attention: NativeTreeAttention,
        numbers: range,
        norm: bool,
    ) -> Tensor:
        """Runs some layers.

        Args:
            x: [T, E] inputs.
            turns: Cosines and sines, each [T, D / 2] float32.
            slots: [T] pool slots that receive the rows' keys and values.
            pool: Keys and values, each [layers, slots, K, D] of x's type.
            attention: Attention of the batch.
            numbers: Numbers of the layers.
            norm: Whether the final norm follows.

        Returns:
            [T, E].
        """
        out = x.clone(memory_format=torch.contiguous_format)
        cos, sin, slots = (column.contiguous() for column in (*turns, slots))
        keys, values = (side[numbers.start :] for side in pool)
        scratch = x.new_empty(x.shape[0] * self.shape.scratch)
        get_library().decoder_layers(
            TYPES[x.dtype],
            ctypes.addressof(self._layers) + numbers.start * ctypes.sizeof(_Layer),
            len(numbers),
            ctypes.addressof(self._shape),
            out.data_ptr(),
            x.shape[0],
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            attention.address,
            attention.num_trees,
            attention.together(self.shape.heads),
            self._norm.data_ptr() if norm else None,
            scratch.data_ptr(),
        )
        return out


def _layer(weights: LayerWeights) -> _Layer:
    norms = [weights.attention_norm, weights.query_norm, weights.key_norm, weights.mlp_norm]
    products = [weights.qkv, weights.output, weights.gate_up, weights.down]
    return _Layer(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        *(panels.product for panels in products),
    )
