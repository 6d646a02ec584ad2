"""Prefixes that the self-draft head thinks likely: a wide beam search without the target.

It starts from beams that the target has proved, so its first level is exact, and keeps `spread`
times as many prefixes per level as the target will.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.selection import DEAD, keep_best
from recserve.draft.beam import wanted
from recserve.models.drafters.nezha import SelfDraftHead


def likely_prefixes(
    beams: Beams, head: SelfDraftHead, level_offsets: Tensor, widths: list[int], skip_single: bool
) -> Tensor:
    """Keys (as in Scored) of the prefixes below the given beams that may need a score.

    widths: prefixes kept per level for each request. With a prefix come all those above it.
    """
    roots = beams.tails
    states = _states_of_paths(beams, head, level_offsets)
    found = []
    while True:
        needed = wanted(beams, skip_single)
        if beams.level > 0:
            found.append(beams.keys(beams.paths)[needed].flatten())
        if beams.level == beams.trie.num_levels - 1:
            return torch.cat(found)
        beams = _expand(beams, states, roots, head, widths, needed)
        states = states.gather(1, beams.parents[..., None].expand(-1, -1, states.shape[-1]))
        tokens = level_offsets[beams.level - 1] + beams.trie.codes_of(beams.nodes)
        states = head.step(beams.level - 1, states.flatten(0, 1), tokens.flatten())
        states = states.view(*beams.nodes.shape, -1)


def _states_of_paths(beams: Beams, head: SelfDraftHead, level_offsets: Tensor) -> Tensor:
    """[B, W, E] the head's state after the codes of each beam."""
    batch, width = beams.nodes.shape
    state = beams.tails[:, None].expand(-1, width, -1).flatten(0, 1)
    for level in range(beams.level):
        nodes = beams.paths[..., level].flatten()
        state = head.step(level, state, level_offsets[level] + beams.trie.codes_of(nodes))
    return state.view(batch, width, -1)


def _expand(
    beams: Beams,
    states: Tensor,
    roots: Tensor,
    head: SelfDraftHead,
    widths: list[int],
    needed: Tensor,
) -> Beams:
    """The most likely children by the head's own log-probabilities."""
    batch, width = beams.nodes.shape
    children = beams.trie.children(beams.nodes.flatten())
    gain = torch.zeros(children.nodes.shape, device=roots.device)
    rows = needed.flatten().nonzero().flatten()
    logits = head.level_logits(roots[rows // width], states.flatten(0, 1)[rows], beams.level)
    logits = logits.float().gather(1, children.codes[rows].long())
    gain[rows] = logits.masked_fill(~children.valid[rows], DEAD).log_softmax(-1)
    total = (beams.log_probs.flatten()[:, None] + gain).masked_fill(~children.valid, DEAD)
    return keep_best(beams, children.nodes.view(batch, -1), total.view(batch, -1), widths)
