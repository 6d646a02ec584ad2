"""Addresses of a trie's arrays, as the C sources read them."""

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
    """Beams of one level.

    Attributes:
        log_probs: [B, W], -inf where there is no beam.
        paths: [B, W, level] int64 nodes of each beam's prefixes; the last one is its own.
    """

    log_probs: Tensor
    paths: Tensor

    @property
    def distances(self) -> tuple[int, int]:
        """Elements between the paths of two requests, and between the paths of two beams."""
        request, beam, node = self.paths.stride()
        assert node == 1 or self.paths.shape[2] < 2, (
            "the last dimension of paths must be contiguous"
        )
        return request, beam


@dataclass(frozen=True)
class BaseArrays:
    """Arrays of a `Trie`, all int32.

    Attributes:
        first_child: [nodes + 1].
        codes: [nodes].
        first_leaf: [nodes].
        last_leaf: [nodes].
    """

    first_child: Tensor
    codes: Tensor
    first_leaf: Tensor
    last_leaf: Tensor


@dataclass(frozen=True)
class OverlayArrays:
    """Arrays of a `TrieOverlay`: the fields of `Grown` [S], codes [K] and inserted [m]."""

    nodes: Tensor
    first: Tensor
    last: Tensor
    child_first: Tensor
    child_count: Tensor
    codes: Tensor
    inserted: Tensor


class NativeTrie:
    """Addresses of a trie's arrays. It holds references to them, so that they stay valid."""

    def __init__(
        self, base: BaseArrays, any_leaf: int, overlay: OverlayArrays | None = None
    ) -> None:
        """Collects the addresses.

        Args:
            base: Arrays of the base.
            any_leaf: Any node of the last level.
            overlay: Arrays of later changes. None means that there are none.

        Raises:
            ValueError: If an array of the base is not int32.
        """
        columns = [base.first_child, base.codes, base.first_leaf, base.last_leaf]
        if any(column.dtype != torch.int32 for column in columns):
            raise ValueError("the node arrays of the base must be int32 for the C sources")
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
        """Address of the struct."""
        return ctypes.addressof(self._trie)
