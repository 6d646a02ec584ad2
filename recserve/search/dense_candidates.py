"""Dense candidates: the dense head's own best items, which compete with the finished beams.

score = log-probability of the semantic id + dense_weight * dense score
dense score = log-probability under the dense head + history bonus (models/history_bonus.py)
              - what an unwanted item loses (`SlateQuery.unwanted`)

Reranking the beams alone could return only items of the beams. The dense candidates are the head's
best W items. Their semantic ids are scored in the same trees as the beams.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.trie.level_search import DEAD, find_keys
from recserve.kernels.trie.trie import LeafFilter, Trie
from recserve.models.semantic_id_model import item_tables
from recserve.search.beam_search import (
    Beams,
    BeamSearch,
    DenseCandidates,
    LaunchedStates,
    PathScores,
    TargetScores,
    descend,
    native_of,
)
from recserve.search.filters import RequestFilters
from recserve.search.trie_paths import needed_paths


def add_candidates(search: BeamSearch) -> None:
    """Adds the dense head's best allowed items, if a request has a dense weight."""
    requests = search.requests
    if not any(r.dense_weight for r in requests):
        return
    removed, replaced = search.trie.removed_rows, search.trie.replaced_rows
    items = item_tables(search.model)
    dense = items.dense_scores(search.last_hidden, search.trie.num_rows, replaced)
    if (bonus := items.history_bonus) is not None:
        first_item = search.model.template.first_item
        tokens = [r.prefix.keys for r in requests]
        bonus.add_to(dense, [each[each >= first_item] - first_item for each in tokens])
    for b, request in enumerate(requests):
        if (unwanted := request.unwanted) is not None:
            rows = on_device(unwanted.rows, dense.device)
            dense[b, rows] -= on_device(unwanted.amounts, dense.device, dense.dtype)
    open_scores = dense.clone()
    if removed is not None:
        open_scores[:, removed] = DEAD
    for b, request in enumerate(requests):
        if request.excluded is not None and request.excluded.size:
            open_scores[b, torch.from_numpy(request.excluded).to(dense.device).long()] = DEAD
        if request.allowed is not None:
            mask = on_device(request.allowed.mask(), dense.device)
            open_scores[b].masked_fill_(~mask, DEAD)
        if not request.dense_weight:
            open_scores[b] = DEAD
    # One topk for all requests; ranks past a request's own width are invalid.
    width = min(max(r.width for r in requests), dense.shape[1])
    best = open_scores.topk(width, dim=1)
    rank = torch.arange(width, device=dense.device)
    widths = on_device([r.width for r in requests], dense.device)
    valid = (best.values > DEAD) & (rank < widths[:, None])
    weights = on_device([r.dense_weight for r in requests], dense.device)
    search.dense_candidates = DenseCandidates(best.indices, valid, dense, weights[:, None])


def find_candidate_keys(search: BeamSearch) -> None:
    """Finds the paths that the target must score for the candidates."""
    if search.dense_candidates is None:
        return
    owners, rows = search.dense_candidates.flat()
    nodes = search.trie.nodes_of_items(rows)
    search.dense_candidates.keys = needed_paths(search.trie, nodes, owners, search.skip_single)


def unscored_candidate_keys(search: BeamSearch) -> Tensor | None:
    """Returns the keys of the candidates' paths, None if there are no unscored candidates."""
    candidates = search.dense_candidates
    return None if candidates is None or candidates.log_probs is not None else candidates.keys


def score_ready_candidates(search: BeamSearch) -> None:
    """Scores the candidates once all their paths are scored."""
    keys = unscored_candidate_keys(search)
    if keys is not None and not bool((find_keys(search.scored.keys, keys) < 0).any()):
        score_candidates(search, TargetScores(search.model, LaunchedStates(search)))


def score_candidates(search: BeamSearch, scores: PathScores) -> None:
    """Sets the log-probabilities of the candidates."""
    candidates = search.dense_candidates
    assert candidates is not None
    if native_of(search, scores) is not None:
        found = _search_candidates(search, scores, candidates)
    else:
        owners, rows = candidates.flat()
        found = scores.of_paths(owners, search.trie.nodes_of_items(rows))
    log_probs = torch.full(candidates.rows.shape, DEAD, device=found.device)
    log_probs[candidates.valid] = found.float()
    candidates.log_probs = log_probs


def _search_candidates(
    search: BeamSearch, scores: PathScores, candidates: DenseCandidates
) -> Tensor:
    """Returns [n] log-probabilities of the valid candidates, ordered as in `flat`.

    In C, a search that is filtered to the candidates alone finds all of them.
    """
    trie = search.trie
    own = [rows[valid] for rows, valid in zip(candidates.rows, candidates.valid, strict=True)]
    alone = replace(
        search,
        filters=RequestFilters(trie, tuple(_only(trie, rows) for rows in own)),
        beams=Beams.root(len(own), search.last_hidden.device),
        widths=[max(rows.shape[0], 1) for rows in own],
        threshold_ranks=None,
        dense_candidates=None,
    )
    found = descend(alone, scores).last
    items, log_probs = trie.items_of_leaves(found.nodes), []
    for rows, there, values in zip(own, items, found.log_probs, strict=True):
        # Beams come best first: sort them by item row to look the candidates up.
        order = there[: rows.shape[0]].long().argsort()
        log_probs.append(values[order][torch.searchsorted(there[order].long(), rows)])
    return torch.cat(log_probs)


def _only(trie: Trie, rows: Tensor) -> LeafFilter:
    """Returns a filter that allows only these items."""
    return LeafFilter(added=trie.leaf_ranks(rows).long().sort().values)
