"""Proof cache: prefixes that proved a slate are stored with the user's cached root.

When the same request comes again, one forward scores the cached prefixes and proves the slate. It
needs neither the draft head nor another round.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.core.sequence import Sequence
from recserve.kernels.trie.trie import Trie
from recserve.search.beams import Beams


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


def is_plain(request: SlateQuery) -> bool:
    """Returns whether a request has neither filter nor caps. Only its drafts are cached."""
    return request.allowed is None and not request.caps


def _digest(excluded: np.ndarray | None) -> bytes:
    """Returns a digest of excluded rows in their order. None counts as an empty array."""
    rows = np.empty(0, np.int64) if excluded is None else excluded.astype(np.int64)
    return blake2b(rows.tobytes(), digest_size=16).digest()


def cached_drafts(sequences: Seq[Sequence]) -> list[CachedDraft | None]:
    """Returns the cached draft of each recommend request. None where there is none."""
    drafts = [(sequence.cached_prefix.draft, sequence.request) for sequence in sequences]
    return [
        draft
        if isinstance(draft, CachedDraft)
        and isinstance(request, SlateQuery)
        and draft.fits(request)
        else None
        for draft, request in drafts
    ]


def keys_of(drafts: Seq[CachedDraft | None], beams: Beams) -> Tensor:
    """Returns the keys (as in Scored) of the nodes of all cached drafts."""
    size, keys = beams.trie.num_nodes, [beams.nodes[:0, 0]]
    keys += [draft.nodes + number * size for number, draft in enumerate(drafts) if draft]
    return torch.cat(keys)


def cache_scored(beams: Beams) -> None:
    """Caches all scored prefixes of plain requests that have no cached draft."""
    drafts = cached_drafts(beams.sequences)
    if not beams.scored.keys.shape[0] or all(drafts):
        return
    # Every node that was computed is scored, so the host knows how many each request has.
    sizes = [sequence.tree_used for sequence in beams.sequences]
    nodes = torch.split(beams.scored.keys % beams.trie.num_nodes, sizes)
    for sequence, request, own, draft in zip(
        beams.sequences, beams.requests, nodes, drafts, strict=True
    ):
        if draft is None and is_plain(request):
            sequence.cached_prefix.draft = CachedDraft.of(request, own)


def cache_proof(beams: Beams, needed: Tensor) -> None:
    """Caches only the scored prefixes that the proofs of plain requests need.

    The host waits once for the device.

    Args:
        beams: The requests.
        needed: [n] keys (as in `Scored`), each with all prefixes above it.
    """
    needed = torch.unique(needed)
    size, count = beams.trie.num_nodes, len(beams.sequences)
    sizes = torch.bincount(needed // size, minlength=count).tolist()
    nodes = torch.split(needed % size, sizes)
    for sequence, request, own in zip(beams.sequences, beams.requests, nodes, strict=True):
        if is_plain(request):
            sequence.cached_prefix.draft = replace(CachedDraft.of(request, own), trimmed=True)
