"""Drafts that are kept beside the cached roots they were made from: a user who comes back does not
pay for the draft again.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.root_notes import KeptDraft
from recserve.draft.prefixes import PrefixDraft, Reach


def kept_keys(beams: Beams, reach: Reach) -> Tensor | None:
    """Keys (as in Scored) of the drafts kept for these requests; None where one has none that
    fits.
    """
    found = []
    size = beams.trie.num_nodes
    asked = zip(beams.sequences, beams.requests, reach.widths, reach.places, strict=True)
    for number, (sequence, request, width, place) in enumerate(asked):
        draft = sequence.notes.draft
        if draft is None or not draft.fits(request, width, place):
            return None
        found.append(draft.nodes + number * size)
    return torch.cat(found)


def keep(beams: Beams, draft: PrefixDraft, reach: Reach) -> None:
    """Keep the first draft of these requests with their roots, but for those with a filter: another
    filter may leave nothing of it. The draft has its slots: the host knows the length of each tree.
    """
    assert draft.query_keys is not None
    sizes = [sequence.tree_used for sequence in beams.sequences]
    nodes = torch.split(draft.query_keys % beams.trie.num_nodes, sizes)
    asked = zip(beams.sequences, beams.requests, reach.widths, reach.places, nodes, strict=True)
    for sequence, request, width, place, own in asked:
        if width and request.allowed is None:
            sequence.notes.draft = KeptDraft(
                weakref.ref(beams.trie), width, place, request.excluded, own
            )
