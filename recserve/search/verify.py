"""Full beam search as a verifier: children of the scored prefixes, the best W of them kept.

Ties go to the lower trie node, which is the lexicographically smaller semantic id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.core.finite import flaws_of, without_flaws
from recserve.core.request import SlateQuery
from recserve.core.sequence import Sequence, stacked_last_hidden
from recserve.kernels.host import on_device
from recserve.kernels.trie.native_search import KNOWN, MISSING, NativeSearch
from recserve.kernels.trie.trie_children import DEAD
from recserve.models.recommender import Recommender
from recserve.search.beams import Beams
from recserve.search.descent import descend, native_search_of
from recserve.search.expansion import NO_BOUND, best_children, bound_places, value_at
from recserve.search.filters import RequestFilters, leaf_filter
from recserve.search.prefixes import PrefixDraft, needs_score
from recserve.search.scores import level_scores, nothing_scored


def start(beams: Beams, model: Recommender) -> Beams:
    """Level 1 of beams at level 0, from the hidden states of the last root tokens."""
    if native_search_of(beams, model.search) is not None:
        return advance(beams, model)
    return advance(expand(beams, beams.last_hidden, model), model)


def begin(sequences: tuple[Sequence, ...], by_children: bool, filtered: bool = True) -> Beams:
    """Level 0: the empty prefix of each request. All over one trie.

    by_children: levels will be normalised over the valid children, so that prefixes can be left out
    that cannot enter an answer. filtered: with the requests' filters.
    """
    requests = [s.request for s in sequences if isinstance(s.request, SlateQuery)]
    trie = requests[0].trie
    last_hidden = stacked_last_hidden(sequences)
    flaws = None
    if last_hidden.is_cuda:  # on a CPU the lane has looked already
        flaws = _root_flaws(sequences, last_hidden)
        last_hidden = without_flaws(last_hidden, flaws)
    top = torch.zeros(len(sequences), 1, dtype=torch.int64, device=last_hidden.device)
    places = bound_places(requests, last_hidden.device) if by_children else None
    filters = [leaf_filter(trie, r.excluded, r.allowed) if filtered else None for r in requests]
    return Beams(
        sequences,
        RequestFilters(trie, tuple(filters)),
        trie,
        0,
        top,
        torch.zeros(top.shape, device=last_hidden.device),
        torch.empty(len(sequences), 1, 0, dtype=torch.int64, device=last_hidden.device),
        last_hidden,
        nothing_scored(last_hidden),
        places=places,
        flaws=flaws,
    )


def _root_flaws(sequences: tuple[Sequence, ...], last_hidden: Tensor) -> Tensor:
    """[B] of the last states [B, E] of the roots, and of the placeholders' behind them."""
    placeholder_states = [
        s.placeholder_states
        for s in sequences
        if s.placeholders is not None and s.placeholder_states is not None
    ]
    flaws = flaws_of(last_hidden)
    return flaws + flaws_of(torch.stack(placeholder_states)) if placeholder_states else flaws


def record(beams: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor) -> Beams:
    """Beams that know the scored prefixes of a draft.

    slots [T]: pool slot of every node of the draft; hidden [Tq, E] of its computed nodes.
    """
    keys, slots = draft.computed(slots)
    if hidden.is_cuda:  # on a CPU the lane has looked already
        flaws = flaws_of(hidden)
        hidden, owners = without_flaws(hidden, flaws), keys // beams.trie.num_nodes
        beams = beams.with_flaws(flaws.new_zeros(len(beams.sequences)).index_add(0, owners, flaws))
    return replace(beams, scored=beams.scored.add(keys, slots, hidden))


def advance(beams: Beams, model: Recommender) -> Beams:
    """Level by level while every beam that must be scored is scored: then the best W children are
    those of full beam search, whoever drafted them.
    """
    if (search := native_search_of(beams, model.search)) is not None:
        found = descend(beams, search, beams.trie.num_levels, beams.widths, stops=True)
        return found.at(found.level) if found.level > beams.level else beams
    while not beams.finished and (deeper := one_level_deeper(beams, model)) is not None:
        beams = deeper
    return beams


def one_level_deeper(beams: Beams, model: Recommender) -> Beams | None:
    """None where a beam that must be scored is not. One look at the device."""
    if (search := native_search_of(beams, model.search)) is not None:
        found = descend(beams, search, beams.level + 1, beams.widths, stops=True)
        return found.at(found.level) if found.level > beams.level else None
    needed = needs_score(beams, model.config.normalization == "children")
    row = beams.scored.find(beams.keys(beams.nodes))
    if bool((needed & (row < 0)).any()):
        return None
    return expand(beams, _states(beams, row), model)


def _states(beams: Beams, row: Tensor) -> Tensor:
    """[B * W, E] of the given rows [B, W] of `scored`, some state where a row is -1."""
    table = beams.scored.hidden if beams.scored.keys.shape[0] else beams.last_hidden
    return table[row.flatten().clamp(min=0)]


@dataclass(frozen=True)
class ScoredSearch:
    """What scored prefixes lead to. proven: whether it is the answer of full beam search. missing
    [n]: keys of the prefixes that could still change it, each with all above it. needed [n]: keys
    of the scored ones without which this would not be known; none where nobody asked.
    """

    beams: Beams
    proven: bool
    missing: Tensor
    needed: Tensor


def search_scored(beams: Beams, model: Recommender, collect: bool = False) -> ScoredSearch:
    """Beam search in which what is not scored leads nowhere.

    What it finds above the best prefix that it had to leave out is what full beam search has there
    (search/expansion.py), so k items above it are the answer. collect: what was needed.
    """
    wants = [NO_BOUND if r.caps or r.dense_weight else r.k - 1 for r in beams.requests]
    if (search := native_search_of(beams, model.search)) is not None:
        return _search_natively(beams, search, wants, collect)
    places = on_device(wants, beams.nodes.device)[:, None]
    lost = torch.full(places.shape, DEAD, device=beams.nodes.device)
    left_out: list[tuple[Tensor, Tensor]] = []
    used: list[tuple[Tensor, Tensor]] = []
    skip_single = model.config.normalization == "children"
    while not beams.finished:
        needed = needs_score(beams, skip_single)
        row = beams.scored.find(beams.keys(beams.nodes))
        gone = needed & (row < 0)
        if bool(gone.any()):
            held = beams.log_probs.masked_fill(~gone, DEAD)
            lost = torch.maximum(lost, held.amax(1, keepdim=True))
            left_out.append((held, beams.keys(beams.paths)))
            beams = replace(beams, log_probs=beams.log_probs.masked_fill(gone, DEAD))
        if collect:
            held = beams.log_probs.masked_fill(~(needed & ~gone), DEAD)
            used.append((held, beams.keys(beams.paths)))
        beams = expand(beams, _states(beams, row), model)
    kth = value_at(beams.log_probs, places)
    proven = bool(((kth > lost) | (lost == DEAD)).all())
    missing = _keys_reaching([] if proven else left_out, kth)
    return ScoredSearch(beams, proven, missing, _keys_reaching(used, kth))


def _search_natively(
    beams: Beams, search: NativeSearch, wants: list[int], collect: bool
) -> ScoredSearch:
    """The same in C. wants [B]: places as in search/expansion.py."""
    found = descend(beams, search, beams.trie.num_levels, beams.widths)
    kth, lost = found.scores_at(wants), found.levels.lost
    proven = all(least > gone or gone == DEAD for least, gone in zip(kth, lost, strict=True))
    nothing = beams.scored.keys[:0]
    missing = nothing if proven else found.passed(MISSING, kth)
    needed = found.passed(KNOWN, kth) if collect else nothing
    return ScoredSearch(found.at(found.level), proven, missing, needed)


def _keys_reaching(prefixes: list[tuple[Tensor, Tensor]], kth: Tensor) -> Tensor:
    """Keys of those that reach the score of the k-th item, each with all above it.

    prefixes: of each level, log-probabilities [B, W], -inf where they do not count, and keys of
    their paths [B, W, level]. kth [B, 1].
    """
    if not prefixes:
        return kth[:0, 0].long()
    keys, matter = [], []
    for held, paths in prefixes:
        keys.append(paths.flatten())
        matter.append(((held > DEAD) & (held >= kth))[..., None].expand_as(paths).flatten())
    return torch.cat(keys)[torch.cat(matter)]


def expand(beams: Beams, hidden: Tensor, model: Recommender) -> Beams:
    """All allowed children of all beams, the best W of each request, without a host sync.

    hidden [B * W, E] at the last node of each beam, anything finite at those that need none.
    """
    logits, normalizers = level_scores(model, hidden, beams.level)
    return best_children(beams, logits, beams.widths, normalizers)
