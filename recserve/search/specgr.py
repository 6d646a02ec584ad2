"""Items that a retriever proposes for verification, at first freely, then guided by the beams.

A guided draft holds only items below the prefixes that beam search has kept so far: what the
retriever likes there is what the target is likely to accept.
Source: SpecGR (Ding et al. 2024, arXiv 2410.02939), inductive drafting and guided re-drafting.

Proposed items accepted where the target itself thinks them likely enough.

An item is accepted from a likelihood on, whatever else there is to choose from: so items that
training never saw, which no beam would keep, reach the slate. They keep the retriever's order,
because a likelihood ranks items it never saw behind all others. What is unfilled is filled up with
the best beams. Source: SpecGR (Ding et al. 2024, arXiv 2410.02939), target-aware verification. Its
bound is a constant per dataset; ours is relative to an item drawn blindly, so that it means the
same in a catalogue of any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import first_k
from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Slate, SlateQuery
from recserve.core.sequence import Sequence
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_children import DEAD
from recserve.kernels.trie.trie_view import gone_rows
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.recommender import Recommender
from recserve.search.beams import Beams
from recserve.search.capped import answer, with_chosen
from recserve.search.dense import nearest
from recserve.search.prefixes import needed_prefixes
from recserve.search.scores import path_scores, root_scores


@dataclass(frozen=True)
class DraftedItems:
    """Proposed items. owners [n] ascending request numbers, rows [n] item rows.

    keys [m]: the prefixes that the target must score for them, as in Scored.
    """

    owners: Tensor
    rows: Tensor
    keys: Tensor


def draft_freely(beams: Beams, retriever: DenseRetriever, skip_single: bool) -> DraftedItems:
    """The nearest items of every request, as many as it keeps beams."""
    requests = [replace(request, k=request.width, caps=()) for request in beams.requests]
    found = [each.rows for each in nearest(retriever, beams.last_hidden, requests)]
    return _drafted(beams, np.arange(len(found)), found, skip_single)


def draft_under_beams(
    beams: Beams,
    retriever: DenseRetriever,
    unfilled: Seq[int],
    verified: tuple[np.ndarray, ...],
    skip_single: bool,
) -> DraftedItems:
    """The nearest items below the beams of the requests that lack some, as many as each keeps.

    unfilled: request numbers. verified: rows of each request [B] that were proposed before, which
    do not come again.
    """
    asked = beams.requests
    allowed = [_open_below(beams, b, verified[b]) for b in unfilled]
    found = [np.flatnonzero(bitmap) for bitmap in allowed]
    large = [i for i, b in enumerate(unfilled) if found[i].size > asked[b].width]
    if large:
        numbers = [unfilled[i] for i in large]
        bitmaps = [AllowedItems.of(allowed[i]) for i in large]
        requests = [
            replace(asked[b], k=asked[b].width, caps=(), excluded=None, allowed=open_)
            for open_, b in zip(bitmaps, numbers, strict=True)
        ]
        for i, each in zip(
            large, nearest(retriever, beams.last_hidden[numbers], requests), strict=True
        ):
            found[i] = each.rows
    return _drafted(beams, np.array(unfilled), found, skip_single)


def _open_below(beams: Beams, b: int, verified: np.ndarray) -> np.ndarray:
    """[rows] bool: open items below a beam of request b that were not verified before."""
    trie, request = beams.trie, beams.requests[b]
    leaves = trie.leaves(beams.nodes[b][beams.alive()[b]])
    edges = torch.zeros(trie.num_items + 1, dtype=torch.int64, device=trie.device)
    edges.index_add_(0, leaves.first.long(), torch.ones_like(leaves.first, dtype=torch.int64))
    edges.index_add_(0, leaves.last.long(), -torch.ones_like(leaves.last, dtype=torch.int64))
    below = torch.zeros(trie.num_rows, dtype=torch.bool, device=trie.device)
    below[trie.leaf_rows.long()] = edges.cumsum(0)[:-1] > 0
    if (gone := gone_rows(trie)) is not None:
        below[gone] = False
    open_ = below.cpu().numpy()
    if request.allowed is not None:
        open_ &= request.allowed.mask()
    if request.excluded is not None:
        open_[request.excluded] = False
    open_[verified] = False
    return open_


def _drafted(
    beams: Beams, numbers: np.ndarray, found: list[np.ndarray], skip_single: bool
) -> DraftedItems:
    device = beams.last_hidden.device
    sizes = [rows.size for rows in found]
    owners = on_device(np.repeat(numbers, sizes), device)
    rows = on_device(np.concatenate(found), device, torch.int64)
    nodes = beams.trie.nodes_of_items(rows)
    return DraftedItems(owners, rows, needed_prefixes(beams.trie, nodes, owners, skip_single))


MIN_LIFT = 3.0  # accepted: so many times as likely as an item drawn blindly


@dataclass(frozen=True)
class VerifiedItems:
    """Verified items of B requests, in the order they were proposed.

    owners [n] request numbers, rows [n] item rows, log_probs [n] of their semantic ids, accepted
    [n] bool.
    """

    owners: np.ndarray
    rows: np.ndarray
    log_probs: np.ndarray
    accepted: np.ndarray

    def at(self, places: np.ndarray) -> VerifiedItems:
        """Those at the given places."""
        return VerifiedItems(
            self.owners[places], self.rows[places], self.log_probs[places], self.accepted[places]
        )

    def likeliest_first(self) -> VerifiedItems:
        """The same, by log-probability; equal ones in the order of item rows."""
        return self.at(np.lexsort((self.rows, -self.log_probs)))

    def followed_by(self, later: VerifiedItems) -> VerifiedItems:
        """These and those."""
        return VerifiedItems(
            np.concatenate([self.owners, later.owners]),
            np.concatenate([self.rows, later.rows]),
            np.concatenate([self.log_probs, later.log_probs]),
            np.concatenate([self.accepted, later.accepted]),
        )


NO_VERIFIED_ITEMS = VerifiedItems(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, bool)
)


def verify_items(beams: Beams, owners: Tensor, rows: Tensor, model: Recommender) -> VerifiedItems:
    """Items all of whose prefixes are scored. owners, rows [n] as in DraftedItems."""
    nodes = beams.trie.nodes_of_items(rows)
    log_probs = root_scores(beams.trie, nodes, owners, beams.last_hidden, model)
    log_probs = log_probs + path_scores(beams.trie, nodes, owners, beams.scored, model)
    accepted = log_probs >= math.log(MIN_LIFT / beams.trie.num_items)
    return _on_host(owners, rows, log_probs, accepted)


def unfilled(verified: VerifiedItems, beams: Beams) -> list[int]:
    """Numbers of the requests with fewer than k accepted items that their caps allow."""
    numbers = []
    for b, sequence in enumerate(beams.sequences):
        request = _request(sequence)
        rows = with_chosen(sequence, verified.rows[verified.accepted & (verified.owners == b)])
        if first_k(rows, request.caps, request.k).size < request.k:
            numbers.append(b)
    return numbers


def end_filled(beams: Beams, numbers: Seq[int]) -> Beams:
    """Beams that end for all requests but these."""
    ended = torch.ones(len(beams.sequences), dtype=torch.bool)
    ended[list(numbers)] = False
    dead = ended.to(beams.log_probs.device)[:, None]
    return replace(beams, log_probs=beams.log_probs.masked_fill(dead, DEAD))


def slates(beams: Beams, verified: VerifiedItems) -> list[Slate | Continuation | NotFinite]:
    """The accepted items of each request as they came, then the finished beams, likeliest first; k
    under its caps. What another search finds stands behind them in the same order.
    """
    alive = beams.alive()
    rows = beams.trie.items_of_leaves(torch.where(alive, beams.nodes, beams.trie.any_leaf))
    owners, rows, log_probs = alive.nonzero()[:, 0], rows.long()[alive], beams.log_probs[alive]
    found = _on_host(owners, rows, log_probs, torch.ones_like(rows, dtype=torch.bool))
    every = verified.at(verified.accepted).followed_by(found.likeliest_first())
    answers: list[Slate | Continuation | NotFinite] = []
    counts = alive.sum(1).float()
    kept = (counts if beams.flaws is None else counts + beams.flaws).tolist()
    for b, sequence in enumerate(beams.sequences):
        if math.isnan(kept[b]):
            answers.append(NotFinite())
            continue
        mine = every.at(every.owners == b)
        mine = mine.at(np.sort(np.unique(mine.rows, return_index=True)[1]))
        complete = kept[b] < _request(sequence).width
        answers.append(
            answer(sequence, mine.rows, mine.log_probs, complete, exact=False, ranked=False)
        )
    return answers


def _on_host(owners: Tensor, rows: Tensor, log_probs: Tensor, accepted: Tensor) -> VerifiedItems:
    columns = (owners, rows, log_probs.float(), accepted)
    return VerifiedItems(*(column.cpu().numpy() for column in columns))


def _request(sequence: Sequence) -> SlateQuery:
    assert isinstance(sequence.request, SlateQuery)
    return sequence.request
