"""Drafts that are kept beside cached roots: what proved a user's answer proves it again in one
forward, without the draft head and without a repair.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from recserve.core.request import RecommendRequest
from recserve.core.root_notes import KeptDraft, is_plain
from recserve.core.sequence import Sequence
from recserve.search.beams import Beams


def kept(sequences: Seq[Sequence]) -> list[KeptDraft | None]:
    """Of each recommend request the draft that there is for it."""
    drafts = [(sequence.notes.draft, sequence.request) for sequence in sequences]
    return [
        draft if draft and isinstance(asked, RecommendRequest) and draft.fits(asked) else None
        for draft, asked in drafts
    ]


def keys_of(drafts: Seq[KeptDraft | None], beams: Beams) -> Tensor:
    """Keys (as in Scored) of what is there."""
    size, keys = beams.trie.num_nodes, [beams.nodes[:0, 0]]
    keys += [draft.nodes + number * size for number, draft in enumerate(drafts) if draft]
    return torch.cat(keys)


def keep(beams: Beams) -> None:
    """Keep all that was scored for the answers of these requests, where nothing is kept for them
    and they are plain.
    """
    drafts = kept(beams.sequences)
    if not beams.scored.keys.shape[0] or all(drafts):
        return
    # Every node that was computed is scored, so the host knows how many there are of each request.
    sizes = [sequence.tree_used for sequence in beams.sequences]
    nodes = torch.split(beams.scored.keys % beams.trie.num_nodes, sizes)
    asked = zip(beams.sequences, beams.requests, nodes, drafts, strict=True)
    for sequence, request, own, draft in asked:
        if draft is None and is_plain(request):
            sequence.notes.draft = KeptDraft.of(request, own)


def trim(beams: Beams, needed: Tensor) -> None:
    """Keep of what was scored for plain requests what the proof of the answers needed. needed [n]:
    keys, as in Scored, with all above. One look at the device.
    """
    needed = torch.unique(needed)
    size, count = beams.trie.num_nodes, len(beams.sequences)
    sizes = torch.bincount(needed // size, minlength=count).tolist()
    nodes = torch.split(needed % size, sizes)
    for sequence, request, own in zip(beams.sequences, beams.requests, nodes, strict=True):
        if is_plain(request):
            sequence.notes.draft = replace(KeptDraft.of(request, own), trimmed=True)
