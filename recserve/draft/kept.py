"""Drafts that are kept beside cached roots: what proved a user's answer proves it again in one
forward, without the draft head and without a repair.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.root_notes import KeptDraft, is_plain


def are_kept(beams: Beams) -> bool:
    """Whether there is a draft for every request."""
    asked = zip(beams.sequences, beams.requests, strict=True)
    return all(s.notes.draft is not None and s.notes.draft.fits(r) for s, r in asked)


def kept_keys(beams: Beams) -> Tensor:
    """Keys (as in Scored) of the drafts of all requests. Only where they are kept."""
    size = beams.trie.num_nodes
    drafts = [s.notes.draft.nodes for s in beams.sequences if s.notes.draft is not None]
    return torch.cat([nodes + number * size for number, nodes in enumerate(drafts)])


def keep(beams: Beams) -> None:
    """Keep all that was scored for the answers of these requests, where nothing is kept for them
    and they are plain.
    """
    if not beams.scored.keys.shape[0] or are_kept(beams):
        return
    # Every node that was computed is scored, so the host knows how many there are of each request.
    sizes = [sequence.tree_used for sequence in beams.sequences]
    nodes = torch.split(beams.scored.keys % beams.trie.num_nodes, sizes)
    for sequence, request, own in zip(beams.sequences, beams.requests, nodes, strict=True):
        if is_plain(request):
            sequence.notes.draft = KeptDraft.of(request, own)


def trim(beams: Beams, needed: Tensor) -> None:
    """Leave of the kept drafts what the proof of the answers needed. needed [n]: keys, as in
    Scored, with all above. One look at the device.
    """
    needed = torch.unique(needed)
    size, count = beams.trie.num_nodes, len(beams.sequences)
    sizes = torch.bincount(needed // size, minlength=count).tolist()
    nodes = torch.split(needed % size, sizes)
    for sequence, request, own in zip(beams.sequences, beams.requests, nodes, strict=True):
        sequence.notes.draft = replace(KeptDraft.of(request, own), trimmed=True)


def are_trimmed(beams: Beams) -> bool:
    """Whether nothing is left to trim."""
    drafts = [sequence.notes.draft for sequence in beams.sequences]
    return all(draft is not None and draft.trimmed for draft in drafts)
