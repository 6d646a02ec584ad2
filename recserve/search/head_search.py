"""What the self-draft head thinks: beam search without the target, as a draft or as an answer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.trie.native_search import ANY, KNOWN
from recserve.kernels.trie.trie_children import child_log_probs
from recserve.kernels.trie.trie_view import TrieView
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.drafters.prefix_head import PrefixHead
from recserve.search.beams import Beams
from recserve.search.descent import descend, native_search_of
from recserve.search.expansion import best_children, value_at
from recserve.search.prefixes import needs_score


def search(beams: Beams, head: SelfDraftHead, contexts: Tensor, widths: list[int]) -> Beams:
    """Finished beams, by the head's own log-probabilities normalised over the valid children.

    beams: at level 0, the empty prefix of each request. contexts [B, L, E]: what the head reads at
    each level beside its state. widths: beams that each request keeps.
    """
    if (native := native_search_of(beams, head.search)) is not None:
        levels = beams.trie.num_levels
        return descend(beams, native, levels, widths, contexts=contexts).at(levels)
    states = beams.last_hidden
    while not beams.finished:
        deeper = _expand(beams, states, contexts[:, beams.level], head, widths)
        if deeper.level < beams.trie.num_levels:
            states = _step(beams, deeper, states, head)
        beams = deeper
    return beams


def likely_prefixes(
    beams: Beams, head: PrefixHead, widths: list[int], places: list[int], skip_single: bool
) -> Tensor:
    """Keys (as in Scored) of the given beams and of the prefixes below them that the head's own
    search passes, but for those below the floor that it ends with. With a prefix come all above it.

    It starts from beams that the target has proved, so the first level is exact. widths: prefixes
    that are kept of each length for each request. places: place, from 0, of the found item whose
    score is the floor, as in search/expansion.py.
    """
    at = on_device(places, beams.nodes.device)[:, None]
    beams, contexts = replace(beams, places=at), head.contexts(beams.last_hidden)
    if (native := native_search_of(beams, head.search)) is not None:
        found = descend(beams, native, beams.trie.num_levels, widths, contexts=contexts)
        return found.passed(KNOWN if skip_single else ANY, found.scores_at(places))
    passed, states = [beams], _states_of_paths(beams, head)
    while not (last := passed[-1]).finished:
        deeper = _expand(last, states, contexts[:, last.level], head, widths)
        if deeper.level < beams.trie.num_levels:
            states = _step(last, deeper, states, head)
        passed.append(deeper)
    floor = value_at(passed[-1].log_probs, at)
    keys, needed = [beams.nodes[:0, 0]], [beams.nodes[:0, 0].bool()]
    for each in passed[:-1]:
        may = needs_score(each, skip_single) & (each.log_probs >= floor)
        keys.append(each.keys(each.paths).flatten())
        needed.append(may[..., None].expand_as(each.paths).flatten())
    return torch.cat(keys)[torch.cat(needed)]


def item_log_probs(
    head: SelfDraftHead,
    trie: TrieView,
    owners: Tensor,
    rows: Tensor,
    last_hidden: Tensor,
    contexts: Tensor,
) -> Tensor:
    """[M] the head's log-probability of given items.

    owners, rows [M]: request and item row of each; last_hidden [B, E] and contexts [B, L, E] as for
    `search`.
    """
    nodes = trie.nodes_of_items(rows)
    parents, state = torch.zeros_like(rows), last_hidden[owners]
    total = torch.zeros(rows.shape, device=last_hidden.device)
    for level, width in enumerate(trie.widths):
        logits = head.level_logits(contexts[owners, level], state, level)
        own = nodes[:, level]
        total += child_log_probs(trie, parents, own[:, None], logits, width)[:, 0]
        if level + 1 < trie.num_levels:
            parents, state = own, head.step(level, state, trie.codes_of(own))
    return total


def _states_of_paths(beams: Beams, head: PrefixHead) -> Tensor:
    """[B * W, E] the head's state after the codes of each beam."""
    width = beams.nodes.shape[1]
    state = beams.last_hidden[:, None].expand(-1, width, -1).flatten(0, 1)
    for level in range(beams.level):
        state = head.step(level, state, _codes(beams.trie, beams.paths[..., level], level))
    return state


def _step(before: Beams, beams: Beams, states: Tensor, head: PrefixHead) -> Tensor:
    """States one level deeper, of all beams: how many are needed is not known without waiting."""
    assert beams.parents is not None
    above = before.nodes.shape[1]
    owners = torch.arange(beams.nodes.shape[0], device=beams.nodes.device)[:, None]
    parents = (owners * above + beams.parents).flatten()
    return head.step(before.level, states[parents], _codes(beams.trie, beams.nodes, before.level))


def _codes(trie: TrieView, nodes: Tensor, level: int) -> Tensor:
    """[n] the last code of each beam of a level [B, W], any of the level's where it is dead, which
    is a leaf.
    """
    return trie.codes_of(nodes.flatten()).clamp(max=trie.codebook_sizes[level] - 1)


def _expand(
    beams: Beams, states: Tensor, contexts: Tensor, head: PrefixHead, widths: list[int]
) -> Beams:
    """The most likely children by the head's own log-probabilities. contexts [B, E]."""
    context = contexts.repeat_interleave(beams.nodes.shape[1], 0)
    return best_children(beams, head.level_logits(context, states, beams.level), widths)
