"""Attention of a packed batch over pages: what serving hands to a trunk."""

from __future__ import annotations

from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.cpu.cpu_attention import CpuTreeAttention
from recserve.kernels.cpu.cpu_plan import Form
from recserve.kernels.cpu.native_layers import NativeLayers
from recserve.kernels.fp8_attention import attention_to
from recserve.kernels.paged_kv import KVPool, TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation
from recserve.models.rope import Rope


class PagedAttention:
    """An `Attend` that writes the keys and values of the computed nodes to their slots.

    turns: whether it wants projections as they come, to turn and write them in one pass.
    """

    def __init__(
        self,
        batch: TreeBatch,
        pool: KVPool,
        activation: Activation = SOFTMAX,
        attention: dispatch.BatchAttention = dispatch.tree_attention,
    ) -> None:
        """attention: how the nodes of a batch attend."""
        attention = attention_to(pool.keys, attention)
        self.pool = pool
        self.slots = batch.query_slots()
        self.turns = type(pool) is KVPool and dispatch.turns(pool.keys)
        self._softmax = activation.normalizer is None
        self._attention = attention(batch, activation)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attend: query [Tq, H, D], key and value [Tq, K, D] -> [Tq, H, D]."""
        pool = self.pool
        pool.write(layer, self.slots, key, value)
        return self._attention(query, key, value, pool.keys[layer], pool.values[layer])

    def of_projections(self, layer: int, qkv: Tensor, rope: Rope) -> Tensor:
        """The same from qkv [Tq, H + 2 K, D], queries first, before RoPE; where `turns`."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        query = dispatch.rope_write(qkv, rope.cos, rope.sin, self.slots, keys, values)
        # Kernels read the computed nodes' own keys and values from the pool.
        return self._attention(query, query, query, keys, values)

    def through(self, layers: NativeLayers, x: Tensor, rope: Rope, count: int) -> Tensor | None:
        """x [Tq, E] through the first `count` layers in one call, where those are all normed too;
        None where they go one by one.
        """
        keys, values = self.pool.keys, self.pool.values
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            return None
        if not self.turns or not isinstance(self._attention, CpuTreeAttention) or x.ndim != 2:
            return None
        s = layers.shape
        form = Form(s.kv_heads, s.heads // s.kv_heads, s.dim, x.dtype, self._softmax)
        attention = self._attention.natively(form) if keys.dtype == x.dtype else None
        if attention is None:
            return None
        turns = rope.cos, rope.sin
        return layers(x, turns, self.slots, (keys, values), attention, count)
