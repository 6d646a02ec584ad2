"""Drafts that a cached root holds. The prefix cache drops them with the root."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.kernels.trie.trie_view import TrieView


@dataclass(frozen=True)
class CachedDraft:
    """Prefixes that proved a slate. Scored in one forward, they prove it again.

    Attributes:
        trie: Catalogue version of the request. The draft does not keep it alive.
        width: Beam width of the request.
        k: Items of the slate.
        dense_weight: Weight of the dense head.
        excluded: Digest of the excluded rows, of which a request may name thousands.
        nodes: [n] int64 trie nodes in ascending order, in memory of their own.
        trimmed: True once unneeded nodes have been removed.
    """

    trie: weakref.ref[TrieView]
    width: int
    k: int
    dense_weight: float
    excluded: bytes
    nodes: Tensor
    trimmed: bool = False

    @staticmethod
    def of(request: SlateQuery, nodes: Tensor) -> CachedDraft:
        """Returns the draft of a request whose slate these nodes proved."""
        return CachedDraft(
            weakref.ref(request.trie),
            request.width,
            request.k,
            request.dense_weight,
            _digest(request.excluded),
            nodes.clone(),  # a view would keep the tensor of the whole step alive
        )

    def fits(self, request: SlateQuery) -> bool:
        """Returns whether a request on the same root is the same; only a plain one can be."""
        return (
            self.trie() is request.trie
            and (self.width, self.k) == (request.width, request.k)
            and self.dense_weight == request.dense_weight
            and is_plain(request)
            and self.excluded == _digest(request.excluded)
        )


@dataclass
class PrefixMetadata:
    """Notes of one cached root. draft: that of its newest slate, None: there is none."""

    draft: CachedDraft | None = None


def is_plain(request: SlateQuery) -> bool:
    """Returns whether a request has neither filter nor caps, whose drafts are not cached."""
    return request.allowed is None and not request.caps


def _digest(excluded: np.ndarray | None) -> bytes:
    """Digest of excluded rows in their order, the same for None and for no rows."""
    rows = np.empty(0, np.int64) if excluded is None else excluded.astype(np.int64)
    return blake2b(rows.tobytes(), digest_size=16).digest()
