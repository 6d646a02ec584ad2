"""What the self-draft head thinks: beam search without the target, as a draft or as an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.bounds import value_at
from recserve.core.expansion import best_children
from recserve.core.selection import keep_best
from recserve.draft.beam import wanted
from recserve.kernels.trie_children import DEAD
from recserve.kernels.trie_overlay import AnyTrie, padding_of
from recserve.models.drafters.nezha import SelfDraftHead


@dataclass(frozen=True)
class _States:
    """The head's states at the beams below which the trie forks; no other is ever read.

    slots [B * W]: row of `values` that belongs to each beam. values [n, E].
    """

    slots: Tensor
    values: Tensor


def search(beams: Beams, head: SelfDraftHead, contexts: Tensor, widths: list[int]) -> Beams:
    """Finished beams, by the head's own log-probabilities normalised over the valid children.

    beams: at level 0, the empty prefix of each request. contexts [B, L, E]: what the head reads at
    each level beside its state. widths: beams that each request keeps.
    """
    states = _States(torch.arange(len(beams.sequences), device=beams.tails.device), beams.tails)
    while not beams.finished:
        deeper = _expand(beams, states, contexts[:, beams.level], head, widths)
        if deeper.level < beams.trie.num_levels:
            states = _step(beams, deeper, states, head)
        beams = deeper
    return beams


def likely_prefixes(
    beams: Beams, head: SelfDraftHead, widths: list[int], places: Tensor, skip_single: bool
) -> Tensor:
    """Keys (as in Scored) of the given beams and of the prefixes below them that the head's own
    search passes, but for those below the floor that it ends with. With a prefix come all above it.

    It starts from beams that the target has proved, so the first level is exact. widths: prefixes
    that are kept of each length for each request. places [B, 1]: place, from 0, of the found item
    whose score is the floor, as in core/bounds.py.
    """
    found, states = [replace(beams, places=places)], _states_of_paths(beams, head)
    while not (last := found[-1]).finished:
        deeper = _expand(last, states, last.tails, head, widths)
        if deeper.level < beams.trie.num_levels:
            states = _step(last, deeper, states, head)
        found.append(deeper)
    floor = value_at(found[-1].log_probs, places)
    keys, needed = [beams.nodes[:0, 0]], [beams.nodes[:0, 0].bool()]
    for each in found[:-1]:
        may = wanted(each, skip_single) & (each.log_probs >= floor)
        keys.append(each.keys(each.paths).flatten())
        needed.append(may[..., None].expand_as(each.paths).flatten())
    return torch.cat(keys)[torch.cat(needed)]


def item_log_probs(
    head: SelfDraftHead, trie: AnyTrie, rows: Tensor, tails: Tensor, contexts: Tensor
) -> Tensor:
    """[M] the head's log-probability of given items.

    rows [M] item rows; tails [M, E] and contexts [M, L, E] of the request each is asked for.
    """
    nodes = trie.nodes_of_items(rows)
    parents = torch.cat([torch.zeros_like(nodes[:, :1]), nodes[:, :-1]], dim=1)
    total, state = torch.zeros(rows.shape, device=tails.device), tails
    for level in range(trie.num_levels):
        children = trie.children(parents[:, level], padding_of(trie, level))
        logits = head.level_logits(contexts[:, level], state, level).float()
        logits = logits.gather(1, children.codes.long()).masked_fill(~children.valid, DEAD)
        slots = trie.places(nodes[:, level], parents[:, level])[:, None]
        total += logits.log_softmax(-1).gather(1, slots.long())[:, 0]
        if level + 1 < trie.num_levels:
            state = head.step(level, state, trie.codes_of(nodes[:, level]))
    return total


def _states_of_paths(beams: Beams, head: SelfDraftHead) -> _States:
    """The head's state after the codes of each beam."""
    batch, width = beams.nodes.shape
    state = beams.tails[:, None].expand(-1, width, -1).flatten(0, 1)
    for level in range(beams.level):
        state = head.step(level, state, beams.trie.codes_of(beams.paths[..., level].flatten()))
    return _States(torch.arange(batch * width, device=state.device), state)


def _step(before: Beams, beams: Beams, states: _States, head: SelfDraftHead) -> _States:
    """States one level deeper."""
    trie, width = beams.trie, beams.nodes.shape[1]
    if beams.nodes.is_cuda:  # of all beams: how many fork is not known without waiting
        rows = torch.arange(beams.nodes.numel(), device=beams.nodes.device)
    else:
        below = trie.leaves(beams.nodes)
        rows = ((below.last - below.first > 1) & beams.alive()).flatten().nonzero().flatten()
    above = rows // width * before.nodes.shape[1] + beams.parents.flatten()[rows]
    codes = trie.codes_of(beams.nodes.flatten()[rows])
    values = head.step(before.level, states.values[states.slots[above]], codes)
    slots = torch.zeros(beams.nodes.numel(), dtype=torch.int64, device=rows.device)
    slots[rows] = torch.arange(rows.shape[0], device=rows.device)
    return _States(slots, values)


def _expand(
    beams: Beams, states: _States, contexts: Tensor, head: SelfDraftHead, widths: list[int]
) -> Beams:
    """The most likely children by the head's own log-probabilities. contexts [B, E]."""
    batch, width = beams.nodes.shape
    if beams.nodes.is_cuda:
        state = states.values[states.slots]
        context = contexts.repeat_interleave(width, 0)
        return best_children(beams, head.level_logits(context, state, beams.level), widths)
    children = beams.trie.children(beams.nodes.flatten())
    gain = torch.zeros(children.nodes.shape, device=contexts.device)
    rows = beams.forked().flatten().nonzero().flatten()
    state = states.values[states.slots[rows]]
    logits = head.level_logits(contexts[rows // width], state, beams.level)
    logits = logits.float().gather(1, children.codes[rows].long())
    gain[rows] = logits.masked_fill(~children.valid[rows], DEAD).log_softmax(-1)
    total = (beams.log_probs.flatten()[:, None] + gain).masked_fill(~children.valid, DEAD)
    return keep_best(beams, children.nodes.view(batch, -1), total.view(batch, -1), widths)
