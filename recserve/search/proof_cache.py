"""Proof cache: prefixes that proved a slate are stored with the user's cached root.

When the same request comes again, one forward scores the cached prefixes and proves the slate. It
needs neither the draft head nor another round.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from recserve.core.prefix_metadata import CachedDraft, is_plain
from recserve.core.request import SlateQuery
from recserve.core.sequence import Sequence
from recserve.search.beams import Beams


def cached_drafts(sequences: Seq[Sequence]) -> list[CachedDraft | None]:
    """Returns the cached draft of each recommend request. None where there is none."""
    drafts = [(sequence.metadata.draft, sequence.request) for sequence in sequences]
    return [
        draft if draft and isinstance(request, SlateQuery) and draft.fits(request) else None
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
            sequence.metadata.draft = CachedDraft.of(request, own)


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
            sequence.metadata.draft = replace(CachedDraft.of(request, own), trimmed=True)
