"""Paged keys and values.

A page is S consecutive slots. A slot holds one token's key and value in every layer. The engine
allocates pages; this file only knows addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recserve.kernels.cache.fp8 import clear_rows, copy_rows, put, vector_bytes, zeros


@dataclass(frozen=True)
class KVShape:
    """Shape of one token's cache.

    Attributes:
        num_layers: Layers of the model.
        num_kv_heads: K.
        head_dim: D.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one slot: keys and values of all layers, in a pool of this type."""
        return 2 * self.num_layers * self.num_kv_heads * vector_bytes(self.head_dim, dtype)


class KVPool:
    """All pages of one model.

    The engine never allocates the page after the last one. Padding of a batch is written to its
    first slot, `spare_slot`.

    Attributes:
        keys: [num_layers, (P + 1) * S, K, D], a float type or FP8.
        values: Same shape and type as the keys.
        spare_slot: Slot that receives padding.
        writes_as_given: Whether `write` stores keys and values as they are, so that a kernel may
            do it.
        attached: Pools with the same slots, such as a drafter's. Copies and deletions apply to them
            too.
    """

    writes_as_given: ClassVar[bool] = True

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scratch: int = 0,
    ) -> None:
        """Allocates the pages, and `scratch` slots behind them that no page has."""
        self.spare_slot = num_pages * page_size
        slots = self.spare_slot + page_size + scratch
        size = (shape.num_layers, slots, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        self.attached: list[KVPool] = []
        # A masked key may still be read and multiplied by zero, so unwritten slots must be finite.
        self.keys = zeros(size, dtype, device)
        self.values = zeros(size, dtype, device)

    @property
    def first_scratch_slot(self) -> int:
        """First slot of the scratch memory."""
        return self.spare_slot + self.page_size

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores n tokens of one layer. slots: [n], distinct. key, value: [n, K, D]."""
        put(self.keys[layer], slots, key)
        put(self.values[layer], slots, value)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copies tokens of all layers from slots `source` [n] to slots `target` [n].

        All slots are read before any is written.
        """
        copy_rows(self.keys, 1, source, target)
        copy_rows(self.values, 1, source, target)
        for pool in self.attached:
            pool.copy_slots(source, target)

    def clear_slots(self, slots: Tensor) -> None:
        """Writes zeros to slots [n].

        A NaN there would spread to every row that multiplies the masked key by zero.
        """
        clear_rows(self.keys, 1, slots)
        clear_rows(self.values, 1, slots)
        for pool in self.attached:
            pool.clear_slots(slots)
