"""Beam search as the verifier of drafts: the best W children of scored prefixes.

A round is `propose` (prefixes.py), one forward, `record`, then `advance`, level by level.

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
from recserve.kernels.trie.level_search import DEAD
from recserve.kernels.trie.native import KNOWN, MISSING, NativeDescent
from recserve.models.recommender import Recommender
from recserve.search.beams import Beams
from recserve.search.descent import descend, native_search_of
from recserve.search.expansion import NO_BOUND, best_children, bound_places, value_at
from recserve.search.filters import RequestFilters, leaf_filter
from recserve.search.prefixes import PrefixDraft, needs_score
from recserve.search.scores import level_scores, nothing_scored


def start(beams: Beams, model: Recommender) -> Beams:
    """Returns the beams of level 1, and of further levels if their prefixes are scored.

    The last hidden state of the root scores level 1.
    """
    if native_search_of(beams, model.search) is not None:
        return advance(beams, model)
    return advance(expand(beams, beams.last_hidden, model), model)


def begin(sequences: tuple[Sequence, ...], by_children: bool, filtered: bool = True) -> Beams:
    """Returns level 0: the empty prefix of each request.

    Args:
        sequences: The requests, all over one trie.
        by_children: Whether levels are normalised over the valid children. Prefixes that cannot
            enter the result may then be dropped.
        filtered: Whether the requests' filters apply.
    """
    requests = [s.request for s in sequences if isinstance(s.request, SlateQuery)]
    trie = requests[0].trie
    last_hidden = stacked_last_hidden(sequences)
    flaws = None
    if last_hidden.is_cuda:  # on a CPU the scheduler has checked already
        flaws = _root_flaws(sequences, last_hidden)
        last_hidden = without_flaws(last_hidden, flaws)
    # The empty prefix is trie node 0.
    top = torch.zeros(len(sequences), 1, dtype=torch.int64, device=last_hidden.device)
    places = bound_places(requests, last_hidden.device) if by_children else None
    filters = [leaf_filter(trie, r.excluded, r.allowed) if filtered else None for r in requests]
    return Beams(
        sequences=sequences,
        filters=RequestFilters(trie, tuple(filters)),
        trie=trie,
        level=0,
        nodes=top,
        log_probs=torch.zeros(top.shape, device=last_hidden.device),
        paths=torch.empty(len(sequences), 1, 0, dtype=torch.int64, device=last_hidden.device),
        last_hidden=last_hidden,
        scored=nothing_scored(last_hidden),
        places=places,
        flaws=flaws,
    )


def _root_flaws(sequences: tuple[Sequence, ...], last_hidden: Tensor) -> Tensor:
    """Returns [B] flaws of the roots' last states [B, E] and of the placeholders' states."""
    placeholder_states = [
        s.placeholder_states
        for s in sequences
        if s.placeholders is not None and s.placeholder_states is not None
    ]
    flaws = flaws_of(last_hidden)
    return flaws + flaws_of(torch.stack(placeholder_states)) if placeholder_states else flaws


def record(beams: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor) -> Beams:
    """Returns beams that hold the scored prefixes of a draft.

    Args:
        beams: The requests.
        draft: The draft that the forward computed.
        slots: [T] pool slot of every node.
        hidden: [Tq, E] states of the computed nodes.
    """
    keys, slots = draft.computed(slots)
    if hidden.is_cuda:  # on a CPU the scheduler has checked already
        flaws = flaws_of(hidden)
        hidden, owners = without_flaws(hidden, flaws), keys // beams.trie.num_nodes
        beams = beams.with_flaws(flaws.new_zeros(len(beams.sequences)).index_add(0, owners, flaws))
    return replace(beams, scored=beams.scored.add(keys, slots, hidden))


def advance(beams: Beams, model: Recommender) -> Beams:
    """Returns the beams of the deepest level that the scored prefixes prove.

    A level advances once every beam that needs a score has one. Its best W children are then those
    of full beam search, whichever drafter proposed them.
    """
    if (search := native_search_of(beams, model.search)) is not None:
        found = descend(beams, search, beams.trie.num_levels, beams.widths, stops=True)
        return found.at(found.level) if found.level > beams.level else beams
    while not beams.finished and (deeper := one_level_deeper(beams, model)) is not None:
        beams = deeper
    return beams


def one_level_deeper(beams: Beams, model: Recommender) -> Beams | None:
    """Returns the beams of the next level, None if a beam that needs a score has none.

    The host waits once for the device.
    """
    if (search := native_search_of(beams, model.search)) is not None:
        found = descend(beams, search, beams.level + 1, beams.widths, stops=True)
        return found.at(found.level) if found.level > beams.level else None
    needed = needs_score(beams, model.config.normalization == "children")
    row = beams.scored.find(beams.keys(beams.nodes))
    if bool((needed & (row < 0)).any()):
        return None
    return expand(beams, _states(beams, row), model)


def _states(beams: Beams, row: Tensor) -> Tensor:
    """Returns [B * W, E] states of the rows [B, W] of `scored`, any state where the row is -1."""
    table = beams.scored.hidden if beams.scored.keys.shape[0] else beams.last_hidden
    return table[row.flatten().clamp(min=0)]


@dataclass(frozen=True)
class ScoredSearch:
    """Result of a beam search over the scored prefixes.

    Attributes:
        beams: The finished beams.
        proven: Whether their slates equal those of full beam search.
        missing: [n] keys of the unscored prefixes that could still change the result, each with all
            prefixes above it.
        needed: [n] keys of the scored prefixes that the proof depends on. Empty if not requested.
    """

    beams: Beams
    proven: bool
    missing: Tensor
    needed: Tensor


def search_scored(beams: Beams, model: Recommender, collect: bool = False) -> ScoredSearch:
    """Searches over the scored prefixes only: an unscored prefix has no children.

    Above the best prefix that the search dropped, it finds what full beam search finds
    (search/expansion.py). The slate is proven if k items are above that prefix.

    Args:
        beams: The beams to start from.
        model: The target.
        collect: Whether to collect the prefixes that the proof needs.
    """
    # With caps or a dense head nothing is bounded: the slate is proven if no score is missing.
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
            # Unscored prefixes die here; `lost` is the best score among them.
            held = beams.log_probs.masked_fill(~gone, DEAD)
            lost = torch.maximum(lost, held.amax(1, keepdim=True))
            left_out.append((held, beams.keys(beams.paths)))
            beams = replace(beams, log_probs=beams.log_probs.masked_fill(gone, DEAD))
        if collect:
            # Scored prefixes that were followed: the proof may depend on them.
            held = beams.log_probs.masked_fill(~(needed & ~gone), DEAD)
            used.append((held, beams.keys(beams.paths)))
        beams = expand(beams, _states(beams, row), model)
    # The slate stands if its k-th score beats every prefix that died for lack of a score.
    kth = value_at(beams.log_probs, places)
    proven = bool(((kth > lost) | (lost == DEAD)).all())
    missing = _keys_reaching([] if proven else left_out, kth)
    return ScoredSearch(beams, proven, missing, _keys_reaching(used, kth))


def _search_natively(
    beams: Beams, search: NativeDescent, wants: list[int], collect: bool
) -> ScoredSearch:
    """Computes `search_scored` in C. wants: [B] ranks as in search/expansion.py."""
    found = descend(beams, search, beams.trie.num_levels, beams.widths)
    kth, lost = found.scores_at(wants), found.levels.lost
    proven = all(least > gone or gone == DEAD for least, gone in zip(kth, lost, strict=True))
    nothing = beams.scored.keys[:0]
    missing = nothing if proven else found.passed(MISSING, kth)
    needed = found.passed(KNOWN, kth) if collect else nothing
    return ScoredSearch(found.at(found.level), proven, missing, needed)


def _keys_reaching(prefixes: list[tuple[Tensor, Tensor]], kth: Tensor) -> Tensor:
    """Returns keys of the prefixes that score at least as much as the k-th item.

    With a prefix come all prefixes above it.

    Args:
        prefixes: For each level, log-probabilities [B, W], -inf where a prefix does not count, and
            keys [B, W, level] of the paths.
        kth: [B, 1] score of the k-th item.
    """
    if not prefixes:
        return kth[:0, 0].long()
    keys, matter = [], []
    for held, paths in prefixes:
        keys.append(paths.flatten())
        matter.append(((held > DEAD) & (held >= kth))[..., None].expand_as(paths).flatten())
    return torch.cat(keys)[torch.cat(matter)]


def expand(beams: Beams, hidden: Tensor, model: Recommender) -> Beams:
    """Returns the best W allowed children of each request, without a host sync.

    Args:
        beams: The beams.
        hidden: [B * W, E] state at the last node of each beam. Any finite state where none is
            needed.
        model: The target.
    """
    logits, normalizers = level_scores(model, hidden, beams.level)
    return best_children(beams, logits, beams.widths, normalizers)
