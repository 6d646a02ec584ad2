"""Final ranking: finished beams, and the dense head's own best items, under one score.

score = log-probability of the semantic id + dense_weight * log-probability under the dense head

Reranking the beams alone could return only items of the beams. The dense candidates are the head's
best W items. Their semantic ids are scored in the same trees, and they compete with the beams.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Slate
from recserve.kernels.host import on_device
from recserve.kernels.trie.level_search import DEAD
from recserve.kernels.trie.native import NativeDescent
from recserve.kernels.trie.trie import LeafFilter, Trie
from recserve.models.recommender import Recommender
from recserve.search.beams import Beams, DenseCandidates
from recserve.search.capped import answer
from recserve.search.descent import descend, native_search_of
from recserve.search.filters import RequestFilters
from recserve.search.prefixes import needed_prefixes
from recserve.search.scores import path_scores, root_scores


def with_dense_candidates(beams: Beams, model: Recommender) -> Beams:
    """Returns beams with the dense head's best allowed items, if a request has a dense weight."""
    requests = beams.requests
    if not any(r.dense_weight for r in requests):
        return beams
    removed, replaced = beams.trie.removed_rows, beams.trie.replaced_rows
    dense = model.dense_scores(beams.last_hidden, beams.trie.num_rows, replaced)
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
    return replace(
        beams, dense_candidates=DenseCandidates(best.indices, valid, dense, weights[:, None])
    )


def with_dense_candidate_keys(beams: Beams, skip_single: bool) -> Beams:
    """Returns beams whose dense candidates hold the keys of their prefixes."""
    if beams.dense_candidates is None:
        return beams
    owners, rows = beams.dense_candidates.flat()
    nodes = beams.trie.nodes_of_items(rows)
    keys = needed_prefixes(beams.trie, nodes, owners, skip_single)
    return replace(beams, dense_candidates=replace(beams.dense_candidates, keys=keys))


def dense_candidate_keys(beams: Beams) -> Tensor | None:
    """Returns the keys of the candidates' unscored prefixes, None if there are none."""
    dense_candidates = beams.dense_candidates
    return (
        None
        if dense_candidates is None or dense_candidates.log_probs is not None
        else dense_candidates.keys
    )


def with_dense_candidate_scores(beams: Beams, model: Recommender) -> Beams:
    """Returns beams with scored dense candidates, once all their prefixes are scored."""
    keys = dense_candidate_keys(beams)
    if keys is None or bool((beams.scored.find(keys) < 0).any()):
        return beams
    assert beams.dense_candidates is not None
    if (search := native_search_of(beams, model.search)) is not None:
        return with_log_probs(beams, searched_scores(beams, search))
    owners, rows = beams.dense_candidates.flat()
    nodes = beams.trie.nodes_of_items(rows)
    scores = root_scores(beams.trie, nodes, owners, beams.last_hidden, model)
    scores = scores + path_scores(beams.trie, nodes, owners, beams.scored, model)
    return with_log_probs(beams, scores)


def searched_scores(beams: Beams, search: NativeDescent, contexts: Tensor | None = None) -> Tensor:
    """Returns [n] log-probabilities of the valid candidates, ordered as in `DenseCandidates.flat`.

    A search in C, filtered to the candidates alone, finds all of them.

    Args:
        beams: The requests.
        search: Search of the model or head.
        contexts: As in `descend`.
    """
    dense_candidates, trie = beams.dense_candidates, beams.trie
    assert dense_candidates is not None
    own = [
        rows[valid]
        for rows, valid in zip(dense_candidates.rows, dense_candidates.valid, strict=True)
    ]
    top = torch.zeros(len(own), 1, dtype=torch.int64)
    alone = replace(
        beams,
        filters=RequestFilters(trie, tuple(_only(trie, rows) for rows in own)),
        level=0,
        nodes=top,
        log_probs=torch.zeros(top.shape),
        paths=top[..., None][..., :0],
        parents=None,
        dense_candidates=None,
        places=None,
    )
    widths = [max(rows.shape[0], 1) for rows in own]
    found = descend(alone, search, trie.num_levels, widths, contexts=contexts).at(trie.num_levels)
    items, scores = trie.items_of_leaves(found.nodes), []
    for rows, there, log_probs in zip(own, items, found.log_probs, strict=True):
        # Beams come best first: sort them by item row to look the candidates up.
        order = there[: rows.shape[0]].long().argsort()
        scores.append(log_probs[order][torch.searchsorted(there[order].long(), rows)])
    return torch.cat(scores)


def _only(trie: Trie, rows: Tensor) -> LeafFilter:
    """Returns a filter that allows only these items."""
    return LeafFilter(added=trie.leaf_ranks(rows).long().sort().values)


def with_log_probs(beams: Beams, scores: Tensor) -> Beams:
    """Returns beams whose valid dense candidates have the log-probabilities `scores` [n]."""
    assert beams.dense_candidates is not None
    log_probs = torch.full(beams.dense_candidates.rows.shape, DEAD, device=scores.device)
    log_probs[beams.dense_candidates.valid] = scores.float()
    return replace(beams, dense_candidates=replace(beams.dense_candidates, log_probs=log_probs))


def slates(beams: Beams, exact: bool) -> list[Slate | Continuation | NotFinite]:
    """Returns the k best items of each request under its caps, best first, ties in item-row order.

    A request with fewer live beams than its width has found all items that it allows. A request
    whose states or scores are not finite gets NotFinite.

    Args:
        beams: Finished beams. Their dense candidates have log-probabilities.
        exact: Whether all scores are the target's own.
    """
    rows, scores = beams.trie.items_of_leaves(beams.nodes), beams.log_probs
    if (dense_candidates := beams.dense_candidates) is not None:
        rows, alive = rows.long(), beams.alive()
        scores = scores + dense_candidates.weights * dense_candidates.dense.gather(1, rows)
        # Candidates that are beams already must not appear twice.
        again = ((dense_candidates.rows[:, :, None] == rows[:, None, :]) & alive[:, None, :]).any(
            -1
        )
        alive = torch.cat([alive, dense_candidates.valid & ~again], dim=1)
        rows = torch.cat([rows, dense_candidates.rows], dim=1)
        scores = torch.cat([scores, dense_candidates.scores], dim=1).masked_fill(~alive, DEAD)
    if beams.flaws is not None:  # one more column, -inf or NaN, so that the host reads one tensor
        scores = torch.cat([scores, (beams.flaws + DEAD)[:, None]], dim=1)
        rows = F.pad(rows, (0, 1))
    rows_read, scores_read = rows.cpu().numpy(), scores.cpu().numpy()
    flawed = np.isnan(scores_read).any(axis=1)
    # The host sorts so few numbers faster than a device could start.
    order = np.lexsort((rows_read, -scores_read))
    answers: list[Slate | Continuation | NotFinite] = []
    alive_read = scores_read > DEAD
    num_alive = np.count_nonzero(alive_read[:, : beams.nodes.shape[1]], axis=1)
    for b, (sequence, width) in enumerate(zip(beams.sequences, beams.widths, strict=True)):
        if flawed[b]:
            answers.append(NotFinite())
            continue
        places = order[b, : np.count_nonzero(alive_read[b])]
        found = rows_read[b, places], scores_read[b, places]
        answers.append(answer(sequence, *found, complete=bool(num_alive[b] < width), exact=exact))
    return answers
