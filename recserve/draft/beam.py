"""Full beam search as a draft: the tree of the prefixes whose continuations the target must score.

A prefix with one child needs no score where a level is normalised over valid children (its child
has log-probability 0); such a node is computed later, and only if something below it forks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.draft.prefixes import PrefixDraft, draft_of_keys


def wanted(beams: Beams, skip_single: bool) -> Tensor:
    """[B, W] bool: beams whose children the target must score. skip_single: those that fork."""
    return beams.forked() if skip_single else beams.alive()


def propose(
    beams: Beams, level_offsets: Tensor, skip_single: bool, extra: Tensor | None = None
) -> PrefixDraft:
    """Trees of all unscored nodes on the way to a beam that must be scored.

    level_offsets [L]: first token of each level. extra [n]: keys of further nodes to score, each
    with all nodes above it.
    """
    missing = wanted(beams, skip_single) & (beams.scored.find(beams.keys(beams.nodes)) < 0)
    keys = beams.keys(beams.paths)[missing].flatten()
    if extra is not None:
        keys = torch.cat([keys, extra])
    return draft_of_keys(beams.trie, keys, len(beams.sequences), level_offsets, beams.scored)
