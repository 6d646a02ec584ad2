"""Beam search by the log-probabilities of a draft head, without the target.

The result is either a draft (`likely_prefixes`) or a finished slate (`search`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.trie.level_search import child_log_probs
from recserve.kernels.trie.native import ANY, KNOWN
from recserve.kernels.trie.trie import Trie
from recserve.models.item_heads import SelfDraftHead
from recserve.search.beams import Beams
from recserve.search.descent import descend, native_search_of
from recserve.search.expansion import best_children, value_at
from recserve.search.prefixes import needs_score


def search(beams: Beams, head: SelfDraftHead, contexts: Tensor, widths: list[int]) -> Beams:
    """Returns finished beams by the head's own log-probabilities over the valid children.

    Args:
        beams: Beams at level 0, the empty prefix of each request.
        head: The draft head.
        contexts: [B, L, E] what the head reads at each level in addition to its state.
        widths: Beam width of each request.
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
    beams: Beams, head: SelfDraftHead, widths: list[int], places: list[int], skip_single: bool
) -> Tensor:
    """Returns keys (as in `Scored`) of the prefixes that the head's own search visits.

    The search starts from beams that the target has proved, so the first level is exact. Prefixes
    below the search's final floor are left out. With a prefix come all prefixes above it.

    Args:
        beams: Proved beams; the search starts below them.
        head: The draft head.
        widths: Prefixes of each length that the search follows for each request.
        places: Rank, from 0, of the found item whose score is the floor of each request.
        skip_single: Whether prefixes with one child are left out.
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
    # Keep what could still reach the floor: the score at the given rank of the last level.
    floor = value_at(passed[-1].log_probs, at)
    keys, needed = [beams.nodes[:0, 0]], [beams.nodes[:0, 0].bool()]
    for each in passed[:-1]:
        may = needs_score(each, skip_single) & (each.log_probs >= floor)
        keys.append(each.keys(each.paths).flatten())
        needed.append(may[..., None].expand_as(each.paths).flatten())
    return torch.cat(keys)[torch.cat(needed)]


def item_log_probs(
    head: SelfDraftHead,
    trie: Trie,
    owners: Tensor,
    rows: Tensor,
    last_hidden: Tensor,
    contexts: Tensor,
) -> Tensor:
    """Returns [M] the head's log-probability of given items.

    Args:
        head: The draft head.
        trie: Trie of the items.
        owners: [M] request of each item.
        rows: [M] item rows.
        last_hidden: [B, E] state of the last root token.
        contexts: [B, L, E] as in `search`.
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


def _states_of_paths(beams: Beams, head: SelfDraftHead) -> Tensor:
    """Returns [B * W, S] the head's state after the codes of each beam."""
    width = beams.nodes.shape[1]
    state = beams.last_hidden[:, None].expand(-1, width, -1).flatten(0, 1)
    for level in range(beams.level):
        state = head.step(level, state, _codes(beams.trie, beams.paths[..., level], level))
    return state


def _step(before: Beams, beams: Beams, states: Tensor, head: SelfDraftHead) -> Tensor:
    """Returns the head's states one level deeper, for all beams.

    Dead beams are included: to count the live ones, the host would have to wait for the device.
    """
    assert beams.parents is not None
    above = before.nodes.shape[1]
    owners = torch.arange(beams.nodes.shape[0], device=beams.nodes.device)[:, None]
    # `states` is packed [B * above, E], so parent columns become row numbers.
    parents = (owners * above + beams.parents).flatten()
    return head.step(before.level, states[parents], _codes(beams.trie, beams.nodes, before.level))


def _codes(trie: Trie, nodes: Tensor, level: int) -> Tensor:
    """Returns [B * W] the last code of each beam of a level, clamped to the codebook.

    A dead beam points to a leaf, whose code may lie outside the level's codebook.
    """
    return trie.codes_of(nodes.flatten()).clamp(max=trie.codebook_sizes[level] - 1)


def _expand(
    beams: Beams, states: Tensor, contexts: Tensor, head: SelfDraftHead, widths: list[int]
) -> Beams:
    """Returns the most likely children by the head's own log-probabilities. contexts: [B, E]."""
    context = contexts.repeat_interleave(beams.nodes.shape[1], 0)
    return best_children(beams, head.level_logits(context, states, beams.level), widths)
