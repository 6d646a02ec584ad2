"""Drafts that are stored with a cached root. The prefix cache drops them together with the root."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.kernels.trie.trie import Trie


@dataclass(frozen=True)
class CachedDraft:
    """Prefixes that proved a slate. Scored in one forward, they prove the same slate again.

    Attributes:
        trie: Catalogue version of the request. The reference is weak.
        width: Beam width of the request.
        k: Number of items of the slate.
        dense_weight: Weight of the dense head.
        excluded: Digest of the excluded rows. A request may name thousands of rows.
        nodes: [n] int64 ascending trie nodes. The tensor owns its memory.
        trimmed: True once unneeded nodes have been removed.
    """

    trie: weakref.ref[Trie]
    width: int
    k: int
    dense_weight: float
    excluded: bytes
    nodes: Tensor
    trimmed: bool = False

    @staticmethod
    def of(request: SlateQuery, nodes: Tensor) -> CachedDraft:
        """Returns the draft for a request whose slate these nodes proved."""
        return CachedDraft(
            weakref.ref(request.trie),
            request.width,
            request.k,
            request.dense_weight,
            _digest(request.excluded),
            nodes.clone(),  # a view would keep the tensor of the whole step alive
        )

    def fits(self, request: SlateQuery) -> bool:
        """Returns whether a plain request on the same root equals the draft's request."""
        return (
            self.trie() is request.trie
            and (self.width, self.k) == (request.width, request.k)
            and self.dense_weight == request.dense_weight
            and is_plain(request)
            and self.excluded == _digest(request.excluded)
        )


@dataclass
class PrefixMetadata:
    """Data that belongs to one cached root.

    Attributes:
        draft: Cached draft of the newest slate. None: no draft is cached.
    """

    draft: CachedDraft | None = None


def is_plain(request: SlateQuery) -> bool:
    """Returns whether a request has neither filter nor caps. Only its drafts are cached."""
    return request.allowed is None and not request.caps


def _digest(excluded: np.ndarray | None) -> bytes:
    """Returns a digest of excluded rows in their order. None counts as an empty array."""
    rows = np.empty(0, np.int64) if excluded is None else excluded.astype(np.int64)
    return blake2b(rows.tobytes(), digest_size=16).digest()
