"""What follows from a root's last state and is kept beside it: it goes when the root does."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

from recserve.core.request import RecommendRequest
from recserve.kernels.trie.trie_view import TrieView


@dataclass(frozen=True)
class KeptDraft:
    """Prefixes that proved an answer: scored in one forward they prove it again.

    asked: the request, but for its root, which is the one this is kept with, and its catalogue
    version, which is not kept alive. excluded: a digest of the excluded rows, of which a request
    may name thousands. nodes [n] int64: of the trie, in ascending order, 8 bytes each and nothing
    behind them. trimmed: none of them is known to be of no use.
    """

    trie: weakref.ref[TrieView]
    width: int
    k: int
    dense_weight: float
    excluded: bytes
    nodes: Tensor
    trimmed: bool = False

    @staticmethod
    def of(request: RecommendRequest, nodes: Tensor) -> KeptDraft:
        """What is kept after an answer to this request."""
        return KeptDraft(
            weakref.ref(request.trie),
            request.width,
            request.k,
            request.dense_weight,
            _digest(request.excluded),
            nodes.clone(),  # of a step's nodes a part would keep all
        )

    def fits(self, request: RecommendRequest) -> bool:
        """Whether a request on the same root asks the same; one that is not plain never does."""
        return (
            self.trie() is request.trie
            and (self.width, self.k) == (request.width, request.k)
            and self.dense_weight == request.dense_weight
            and is_plain(request)
            and self.excluded == _digest(request.excluded)
        )


@dataclass
class RootNotes:
    """Of one cached root. draft: of its newest answer, None: there was none."""

    draft: KeptDraft | None = None


def is_plain(request: RecommendRequest) -> bool:
    """Whether it has neither filter nor caps, of which there are too many to keep a draft for."""
    return request.allowed is None and not request.caps


def _digest(excluded: np.ndarray | None) -> bytes:
    """Of excluded rows in their order; the same for None and for no rows."""
    rows = np.empty(0, np.int64) if excluded is None else excluded.astype(np.int64)
    return blake2b(rows.tobytes(), digest_size=16).digest()
