"""Tree attention with exact sums: a row's result depends only on what the row sees.

A floating-point sum depends on its order. Libraries choose the order by the shapes of a call: the
numbers of rows, keys and threads. Here every term is first rounded to a grid that is coarse enough
for double precision to hold all partial sums. Exact additions do not depend on their order.

  queries, keys, values   multiples of 2^-22 of their vector's size (keys and values as written)
  scores  q . k           44 bits + log2 D <= 53
  weights                 multiples of 2^-22 of the row's largest product of weight and value
  outputs sum of w v      44 bits + log2 keys <= 53; past 512 keys in two halves of 33 bits
  normaliser sum of w     multiples of 2^-30: 30 bits + log2 keys <= 53

So other rows, siblings, page addresses, cached or new prefixes, chunks and threads change no bit.
The grids are as fine as float32. The remaining operations (exp, products, a division) are
elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.attention.fp8 import DecodedAttention
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.tree_batch import TreeBatch

BITS = 22
HALF = 2.0**11
NORMALISER_BITS = 30
ONE_SUM = 512  # products of so many keys fit one exact sum
MOST_KEYS = 2**20
ELEMENTS = 2**21  # scores that are stored at a time
# Integer type of the same size, mantissa bits, and exponent offset of each float type.
LAYOUTS = {
    torch.float64: (torch.int64, 52, 1022),
    torch.float32: (torch.int32, 23, 126),
    torch.bfloat16: (torch.int16, 7, 126),
    torch.float16: (torch.int16, 10, 14),
}


def exponents(x: Tensor) -> Tensor:
    """Returns the exponents e int64 [...] with |x| < 2^e for each vector of x [..., D]."""
    kind, bits, bias = LAYOUTS[x.dtype]
    largest = (x.view(kind) & (torch.iinfo(kind).max >> bits << bits)).amax(-1)
    return ((largest.long() >> bits) - bias).clamp_(min=-500)


def powers(exponent: Tensor) -> Tensor:
    """Returns 2^exponent in float64, exactly. exponent: int64 within +-1000."""
    return ((exponent + 1023) << 52).view(torch.float64)


def on_grid(x: Tensor) -> Tensor:
    """Rounds each vector of x [..., D] to multiples of 2^-BITS of its size; same dtype."""
    step = powers(exponents(x) - BITS)[..., None]
    return ((x.double() / step).round_() * step).to(x.dtype)


class ExactPool(KVPool):
    """A KV pool whose numbers lie on the grid of exact sums."""

    writes_as_given = False

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores keys and values as KVPool.write does, rounded to the grid."""
        super().write(layer, slots, on_grid(key), on_grid(value))


@dataclass(frozen=True)
class _Part:
    """One tree's share of a batch.

    Attributes:
        rows: Its rows among the computed nodes.
        shared: Slots of the m keys that all rows have in common, a slice where they are
            consecutive.
        bias: [n, m], 0 or -inf. None means that all rows see all shared keys.
        own: [n, A] slots of each row's further keys.
        own_bias: [n, A], 0 or -inf.
    """

    rows: slice
    shared: slice | Tensor
    bias: Tensor | None
    own: Tensor | None = None
    own_bias: Tensor | None = None


@dataclass(frozen=True)
class _Keys:
    """Keys and values of a part's rows in float64.

    Attributes:
        keys: [..., m, D].
        values: [..., m, D].
        sizes: [..., m] exponents of the values.
    """

    keys: Tensor
    values: Tensor
    sizes: Tensor

    @staticmethod
    def of(keys: Tensor, values: Tensor, slots: slice | Tensor) -> _Keys:
        """Reads keys at slots: a slice or [m] gives [K, m, D], and [n, A] gives [K, n, A, D]."""
        key, value = keys[slots].movedim(-2, 0), values[slots].movedim(-2, 0)
        return _Keys(key.double(), value.double(), exponents(value))


class ExactTreeAttention:
    """Attention of one batch, planned once and called once per layer; the pool is an ExactPool."""

    def __init__(self, batch: TreeBatch, activation: Activation = SOFTMAX) -> None:
        self.activation = activation
        self.parts = _plan(batch)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attends as `attention.tree_attention`; key and value are read from the pool."""
        return torch.cat([self._part(part, query[part.rows], keys, values) for part in self.parts])

    def _part(self, part: _Part, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        n, heads, dim = query.shape
        kv_heads = keys.shape[1]
        grouped = on_grid(query).double().view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1)
        common = _Keys.of(keys, values, part.shared)
        width = common.sizes.shape[1] + (0 if part.own is None else part.own.shape[1])
        size = max(ELEMENTS // (heads * max(width, 1)), 1)
        out = torch.empty_like(query)
        for start in range(0, n, size):
            rows = slice(start, start + size)
            own = None if part.own is None else _Keys.of(keys, values, part.own[rows])
            out[rows] = self._rows(part, rows, grouped[:, rows], common, own)
        return out

    def _rows(
        self, part: _Part, rows: slice, grouped: Tensor, common: _Keys, own: _Keys | None
    ) -> Tensor:
        """Attends from grouped rows [K, n, G, D] to shared and own keys; [n, H, D]."""
        kv_heads, n, groups, dim = grouped.shape
        count = common.sizes.shape[1]
        scores = torch.matmul(grouped.flatten(1, 2), common.keys.mT).view(
            kv_heads, n, groups, count
        )
        sizes = common.sizes[:, None, None].expand(-1, n, 1, -1)
        bias = None if part.bias is None else part.bias[rows]
        if own is not None:
            assert part.own_bias is not None
            if bias is None:
                bias = scores.new_zeros(n, count)
            bias = torch.cat([bias, part.own_bias[rows]], dim=1)
            scores = torch.cat([scores, torch.matmul(grouped, own.keys.mT)], dim=-1)
            sizes = torch.cat([sizes, own.sizes[:, :, None]], dim=-1)
        scores *= dim**-0.5
        if bias is not None:
            scores += bias[None, :, None]
        weights, total = self._weights(scores)
        # Per row, every product of a weight and a value is a multiple of one number.
        scale = powers(sizes)
        top = exponents(weights * scale)[..., None] - BITS
        units = (weights * (scale / powers(top))).round_()
        unit = powers(top) / scale

        def sums(units: Tensor) -> Tensor:
            part_weights = units * unit
            result = torch.matmul(part_weights[..., :count].flatten(1, 2), common.values)
            result = result.view(kv_heads, n, groups, dim)
            if own is not None:
                result = result + torch.matmul(part_weights[..., count:], own.values)
            return result

        if scores.shape[-1] <= ONE_SUM:
            out = sums(units)
        else:
            high = (units / HALF).floor_() * HALF
            out = sums(high) + sums(units - high)
        return (out / total).permute(1, 0, 2, 3).flatten(1, 2)

    def _weights(self, scores: Tensor) -> tuple[Tensor, Tensor | float]:
        """Returns the factor [..., m] of each key's value, and the divisor of the sum."""
        if self.activation.normalizer is not None:
            weights = scores / ((-scores).exp_() + 1.0)
            return weights.masked_fill_(scores == float("-inf"), 0.0), self.activation.normalizer
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        grid = 2.0**NORMALISER_BITS
        return weights, (weights * grid).round_().sum(-1, keepdim=True) / grid


def exact_attention(
    batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Prepares the attention of one batch, as `attention.tree_attention`."""
    if heads.fp8:
        return DecodedAttention(batch, heads, activation, exact_attention)
    return ExactTreeAttention(batch, activation)


def _plan(batch: TreeBatch) -> list[_Part]:
    tree, device = batch.tree, batch.slots.device
    queries = batch.queries
    if queries is None:
        queries = torch.arange(tree.num_nodes, device=device)
    offsets = tree.offsets.tolist()
    bounds = torch.searchsorted(queries, tree.offsets).tolist()
    parts = []
    for b, prefix in enumerate(batch.prefixes):
        start, stop = offsets[b], offsets[b + 1]
        nodes = queries[bounds[b] : bounds[b + 1]]
        if not nodes.shape[0]:
            continue
        assert prefix.shape[0] + stop - start <= MOST_KEYS
        rows = slice(bounds[b], bounds[b + 1])
        bias = None
        if tree.prefix_limits is not None:
            place = torch.arange(prefix.shape[0], device=device)
            bias = _mask_bias(place < tree.prefix_limits[nodes][:, None])
        levels = int(tree.depths[nodes].max()) + 1
        shared = 0 if tree.shared is None else int(tree.shared[b])
        if not shared and 2 * levels <= stop - start:
            path = torch.cat([nodes[:, None], tree.ancestors(levels - 1)[nodes]], dim=1)
            own = batch.slots[path.clamp(min=0)]
            parts.append(_Part(rows, _place(prefix), bias, own, _mask_bias(path >= 0)))
            continue
        columns = torch.arange(start, stop, device=device)
        seen = (columns <= nodes[:, None]) & (nodes[:, None] < tree.ends[start:stop])
        seen[:, :shared] = True
        if bias is None:
            bias = torch.zeros(nodes.shape[0], prefix.shape[0], device=device)
        slots = torch.cat([prefix, batch.slots[start:stop]])
        parts.append(_Part(rows, _place(slots), torch.cat([bias, _mask_bias(seen)], dim=1)))
    return parts


def _place(slots: Tensor) -> slice | Tensor:
    """Returns consecutive slots as a slice, which gives a view instead of a copy."""
    if not slots.shape[0] or bool((slots.diff() != 1).any()):
        return slots
    return slice(int(slots[0]), int(slots[-1]) + 1)


def _mask_bias(mask: Tensor) -> Tensor:
    """Returns 0 where the mask is true and -inf elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
