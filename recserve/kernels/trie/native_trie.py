"""A trie as the C sources read it: addresses of its arrays, kept with the trie."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.cpu.native import N, P


class _Trie(ctypes.Structure):
    """`Trie` of trie.h."""

    _fields_ = [
        *((name, P) for name in ("first_child", "codes", "first_leaf", "last_leaf")),
        *((name, N) for name in ("nodes", "all_nodes", "any_leaf")),
        *((name, P) for name in ("grown", "grown_first", "grown_last")),
        *((name, P) for name in ("later_first", "later_count")),
        ("num_grown", N),
        ("own_codes", P),
        ("inserted", P),
        ("num_inserted", N),
    ]


@dataclass(frozen=True)
class Prefixes:
    """Beams of one level. log_probs [B, W], -inf where there is none; paths [B, W, level] int64:
    the nodes of each one's prefixes, the last one its own.
    """

    log_probs: Tensor
    paths: Tensor

    @property
    def distances(self) -> tuple[int, int]:
        """Elements from a request's paths to the next one's, and from a beam's to the next."""
        request, beam, node = self.paths.stride()
        assert node == 1 or self.paths.shape[2] < 2, "a path is no row"
        return request, beam


@dataclass(frozen=True)
class BaseArrays:
    """Of `Trie`, all int32: first_child [nodes + 1], codes, first_leaf, last_leaf [nodes]."""

    first_child: Tensor
    codes: Tensor
    first_leaf: Tensor
    last_leaf: Tensor


@dataclass(frozen=True)
class OverlayArrays:
    """Of `TrieOverlay`: those of `Grown` [S], codes [K], inserted [m]."""

    nodes: Tensor
    first: Tensor
    last: Tensor
    child_first: Tensor
    child_count: Tensor
    codes: Tensor
    inserted: Tensor


class NativeTrie:
    """Addresses of a trie's arrays, which are kept as long as this is."""

    def __init__(
        self, base: BaseArrays, any_leaf: int, overlay: OverlayArrays | None = None
    ) -> None:
        """any_leaf: a node of the last level. Raises ValueError for a base that is not int32."""
        columns = [base.first_child, base.codes, base.first_leaf, base.last_leaf]
        if any(column.dtype != torch.int32 for column in columns):
            raise ValueError("the C sources read tries of int32 node arrays")
        columns = [column.contiguous() for column in columns]
        own = [] if overlay is None else list(vars(overlay).values())
        wide = [column.long().contiguous() for column in own]
        self._read = columns, wide
        nodes = base.codes.shape[0]
        self._trie = _Trie(*(column.data_ptr() for column in columns), nodes, nodes, any_leaf)
        if wide:
            grown, first, last, child_first, child_count, codes, inserted = wide
            t = self._trie
            t.all_nodes = nodes + codes.shape[0]
            t.grown, t.num_grown = grown.data_ptr(), grown.shape[0]
            t.grown_first, t.grown_last = first.data_ptr(), last.data_ptr()
            t.later_first, t.later_count = child_first.data_ptr(), child_count.data_ptr()
            t.own_codes, t.inserted = codes.data_ptr(), inserted.data_ptr()
            t.num_inserted = inserted.shape[0]

    @property
    def address(self) -> int:
        """Of the struct."""
        return ctypes.addressof(self._trie)
