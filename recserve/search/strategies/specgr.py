"""Strategy `specgr`: a retriever drafts items, the target accepts the likely ones.

Drafting: the first draft holds the nearest items of the whole catalogue. A guided draft holds only
items below the current beams. The retriever's favourites there are likely to be accepted.

Verification: an item is accepted if its likelihood reaches a bound, whatever other items exist.
Items that training never saw would not survive in a beam, but can be accepted. Accepted items keep
the retriever's order, because a likelihood ranks unseen items last. The best beams fill the
remaining places.

Source: SpecGR (Ding et al. 2024, arXiv 2410.02939), inductive drafting, guided re-drafting and
target-aware verification. The paper's bound is a constant per dataset. This one is relative to the
likelihood of an item drawn uniformly, so it has the same meaning for any catalogue size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import first_k
from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Slate, SlateQuery
from recserve.core.sequence import SearchSequence, request_of
from recserve.core.strategy import Draft, Results
from recserve.kernels.host import on_device
from recserve.kernels.trie.level_search import DEAD, find_keys
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.beam_search import BeamSearch, LaunchedStates
from recserve.search.slates import slate_under_caps, with_chosen
from recserve.search.strategies.beam import level_offsets_of
from recserve.search.strategies.dense import nearest
from recserve.search.strategies.slate_trees import trace_round, with_trees
from recserve.search.strategy import Heads, RecommendStrategy
from recserve.search.trie_paths import PathDraft, needed_paths

MIN_LIFT = 3.0  # accept items at least this many times as likely as an item drawn uniformly


@dataclass(frozen=True)
class DraftedItems:
    """Proposed items.

    Attributes:
        owners: [n] ascending request numbers.
        rows: [n] item rows.
        keys: [m] keys (as in `ScoredPaths`) of the prefixes that the target must score for
            the items.
    """

    owners: Tensor
    rows: Tensor
    keys: Tensor


@dataclass(frozen=True)
class VerifiedItems:
    """Verified items of B requests, in the order of their drafts.

    Attributes:
        owners: [n] request numbers.
        rows: [n] item rows.
        log_probs: [n] log-probabilities of the semantic ids.
        accepted: [n] bool.
    """

    owners: np.ndarray
    rows: np.ndarray
    log_probs: np.ndarray
    accepted: np.ndarray

    def at(self, places: np.ndarray) -> VerifiedItems:
        """Returns the items at the given indices."""
        return VerifiedItems(
            self.owners[places], self.rows[places], self.log_probs[places], self.accepted[places]
        )

    def likeliest_first(self) -> VerifiedItems:
        """Returns the items sorted by log-probability, ties in item-row order."""
        return self.at(np.lexsort((self.rows, -self.log_probs)))

    def followed_by(self, later: VerifiedItems) -> VerifiedItems:
        """Returns these items, then the later ones."""
        return VerifiedItems(
            np.concatenate([self.owners, later.owners]),
            np.concatenate([self.rows, later.rows]),
            np.concatenate([self.log_probs, later.log_probs]),
            np.concatenate([self.accepted, later.accepted]),
        )


NO_VERIFIED_ITEMS = VerifiedItems(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, bool)
)


@dataclass
class SpecGRState:
    """Requests whose drafted items are being verified.

    Attributes:
        search: Beam search so far.
        pending: Drafted items that are not verified yet. None: there are none.
        verified: Items verified so far.
        guided: Level of the beams at the newest guided draft. 0: there was none.
        unfilled: Numbers of the requests with fewer than k accepted items.
    """

    search: BeamSearch
    pending: DraftedItems | None
    unfilled: list[int]
    verified: VerifiedItems = NO_VERIFIED_ITEMS
    guided: int = 0

    @property
    def ended(self) -> bool:
        """True when beam search, and drafting with it, is over."""
        return not self.unfilled or self.search.is_finished


class SpecGRStrategy(RecommendStrategy):
    """SpecGR: lets items that training never saw enter the slate.

    1. The retriever knows an item by its vector. It proposes W items, and one forward gives their
       likelihoods.
    2. If fewer than k are accepted, beam search begins. At each level, the retriever proposes items
       below the beams.
    3. The search ends as soon as k items are accepted. Otherwise the finished beams fill the slate.

    Scores are log-probabilities of semantic ids. Accepted items are ordered by draft: the first
    draft by nearness, later drafts by score.

    Source: Ding et al. 2024, arXiv 2410.02939.
    """

    name = "specgr"
    missing = "no retriever for this recommender; run `recserve train retriever`"

    def __init__(self, model: SemanticIdModel, retriever: DenseRetriever) -> None:
        self.model, self.retriever = model, retriever
        self.level_offsets = level_offsets_of(model)
        self.skip_single = model.config.normalization == "children"

    @classmethod
    def from_models(cls, model: SemanticIdModel, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a retriever."""
        if heads.retriever is None or not model.config.autoregressive:
            return None
        return cls(model, heads.retriever)

    def tree_capacity(self, request: SlateQuery) -> int:
        """Returns the nodes of the beams, the first draft and one draft per level, W items each."""
        levels = request.trie.num_levels - 1
        return request.width * (2 * levels + levels * (levels - 1) // 2)

    def start(self, sequences: Seq[SearchSequence]) -> SpecGRState:
        """Makes the first draft. The prefix's last hidden state scores its items' first codes."""
        began = time.perf_counter()
        search = BeamSearch.start(self.model, sequences, thresholds=False)
        search.advance()
        items = draft_freely(search, self.retriever)
        state = SpecGRState(search, items, list(range(len(sequences))))
        self._settle(state)
        for sequence in sequences:
            sequence.timing.draft_ms += (time.perf_counter() - began) * 1e3
        return state

    def is_finished(self, state: SpecGRState) -> bool:
        """Returns whether every request has k accepted items, or its beams are leaves."""
        return state.pending is None and state.ended

    def propose(self, state: SpecGRState) -> Draft:
        """Returns the drafted items' prefixes, and from the second round on those of the beams."""
        keys = None if state.pending is None else state.pending.keys
        if keys is not None and not state.guided:
            return state.search.lay_out(keys, self.level_offsets)
        return state.search.propose(self.level_offsets, keys)

    def verify(
        self, state: SpecGRState, draft: PathDraft, slots: Tensor, hidden: Tensor
    ) -> SpecGRState:
        """Verifies the drafted items.

        Requests with too few accepted items advance their beams and draft again below them.
        """
        first = state.pending is not None and not state.guided
        trace_round(state.search, draft, "draft" if first else "search")
        state.search.record(draft, slots, hidden)
        self._settle(state)
        return state

    def finish(self, state: SpecGRState) -> Results:
        """Returns the slates."""
        return with_trees(slates(state.search, state.verified), state.search)

    def _settle(self, state: SpecGRState) -> None:
        """Verifies, advances and drafts until a forward is needed or all is done.

        Each level has exactly one draft, even if more prefixes are already scored. Otherwise a
        slate would depend on the other requests of the batch.
        """
        search = state.search
        while True:
            if state.pending is not None:
                if bool((find_keys(search.scored.keys, state.pending.keys) < 0).any()):
                    return
                self._verify_pending(state, state.pending)
            if state.ended:
                return
            level = search.beams.level
            if state.guided == level:
                search.advance(level + 1)
                if search.beams.level == level:
                    return
            if not state.ended:
                self._draft_again(state)

    def _verify_pending(self, state: SpecGRState, items: DraftedItems) -> None:
        """Verifies items, and ends the beams of requests with enough accepted items."""
        found = verify_items(state.search, items.owners, items.rows)
        found = found.likeliest_first() if state.guided else found
        state.verified, state.pending = state.verified.followed_by(found), None
        state.unfilled = unfilled(state.verified, state.search)
        end_filled(state.search, state.unfilled)

    def _draft_again(self, state: SpecGRState) -> None:
        search, verified = state.search, state.verified
        before = tuple(verified.rows[verified.owners == b] for b in range(len(search.sequences)))
        state.pending = draft_under_beams(search, self.retriever, state.unfilled, before)
        state.guided = search.beams.level


def draft_freely(search: BeamSearch, retriever: DenseRetriever) -> DraftedItems:
    """Returns the nearest items of every request, as many as its beam width."""
    requests = [replace(request, k=request.width, caps=()) for request in search.requests]
    found = [each.rows for each in nearest(retriever, search.last_hidden, requests)]
    return _draft_items(search, np.arange(len(found)), found)


def draft_under_beams(
    search: BeamSearch,
    retriever: DenseRetriever,
    unfilled: Seq[int],
    verified: tuple[np.ndarray, ...],
) -> DraftedItems:
    """Returns the nearest items below the beams, for requests with too few accepted items.

    Each request gets at most as many items as its beam width.

    Args:
        search: The search that has found the beams.
        retriever: Proposes items.
        unfilled: Numbers of the requests to draft for.
        verified: Rows that were proposed before for each of the B requests. They are not repeated.
    """
    every = search.requests
    allowed = [_open_below(search, b, verified[b]) for b in unfilled]
    found = [np.flatnonzero(bitmap) for bitmap in allowed]
    large = [i for i, b in enumerate(unfilled) if found[i].size > every[b].width]
    if large:
        numbers = [unfilled[i] for i in large]
        bitmaps = [AllowedItems.of(allowed[i]) for i in large]
        requests = [
            replace(every[b], k=every[b].width, caps=(), excluded=None, allowed=open_)
            for open_, b in zip(bitmaps, numbers, strict=True)
        ]
        for i, each in zip(
            large, nearest(retriever, search.last_hidden[numbers], requests), strict=True
        ):
            found[i] = each.rows
    return _draft_items(search, np.array(unfilled), found)


def _open_below(search: BeamSearch, b: int, verified: np.ndarray) -> np.ndarray:
    """Returns [rows] bool: allowed, unverified items below the beams of request b."""
    trie, request, beams = search.trie, search.requests[b], search.beams
    leaves = trie.leaves(beams.nodes[b][beams.alive()[b]])
    edges = torch.zeros(trie.num_items + 1, dtype=torch.int64, device=trie.device)
    # +1 where a range of leaves begins, -1 where it ends: the running sum is positive inside.
    edges.index_add_(0, leaves.first.long(), torch.ones_like(leaves.first, dtype=torch.int64))
    edges.index_add_(0, leaves.last.long(), -torch.ones_like(leaves.last, dtype=torch.int64))
    below = torch.zeros(trie.num_rows, dtype=torch.bool, device=trie.device)
    below[trie.leaf_rows.long()] = edges.cumsum(0)[:-1] > 0
    if (gone := trie.removed_rows) is not None:
        below[gone] = False
    open_ = below.cpu().numpy()
    if request.allowed is not None:
        open_ &= request.allowed.mask()
    if request.excluded is not None:
        open_[request.excluded] = False
    open_[verified] = False
    return open_


def _draft_items(search: BeamSearch, numbers: np.ndarray, found: list[np.ndarray]) -> DraftedItems:
    trie, device = search.trie, search.last_hidden.device
    sizes = [rows.size for rows in found]
    owners = on_device(np.repeat(numbers, sizes), device)
    rows = on_device(np.concatenate(found), device, torch.int64)
    keys = needed_paths(trie, trie.nodes_of_items(rows), owners, search.skip_single)
    return DraftedItems(owners, rows, keys)


def verify_items(search: BeamSearch, owners: Tensor, rows: Tensor) -> VerifiedItems:
    """Scores items whose prefixes are all scored, and accepts the likely ones.

    Args:
        search: The requests.
        owners: [n] request numbers.
        rows: [n] item rows.
    """
    log_probs = LaunchedStates(search).of_paths(owners, search.trie.nodes_of_items(rows))
    accepted = log_probs >= math.log(MIN_LIFT / search.trie.num_items)
    return _on_host(owners, rows, log_probs, accepted)


def unfilled(verified: VerifiedItems, search: BeamSearch) -> list[int]:
    """Returns the numbers of the requests with fewer than k accepted items under their caps."""
    numbers = []
    for b, sequence in enumerate(search.sequences):
        request = request_of(sequence, SlateQuery)
        rows = with_chosen(sequence, verified.rows[verified.accepted & (verified.owners == b)])
        if first_k(rows, request.caps, request.k).size < request.k:
            numbers.append(b)
    return numbers


def end_filled(search: BeamSearch, numbers: Seq[int]) -> None:
    """Ends the beams of all requests except the given ones."""
    ended, beams = torch.ones(len(search.sequences), dtype=torch.bool), search.beams
    ended[list(numbers)] = False
    dead = ended.to(beams.log_probs.device)[:, None]
    search.beams = replace(beams, log_probs=beams.log_probs.masked_fill(dead, DEAD))


def slates(search: BeamSearch, verified: VerifiedItems) -> list[Slate | Continuation | NotFinite]:
    """Returns each request's slate: accepted items in order, then the best finished beams.

    Under caps, items of a repeated search follow in the same order.
    """
    beams, trie = search.beams, search.trie
    alive = beams.alive()
    rows = trie.items_of_leaves(torch.where(alive, beams.nodes, trie.any_leaf))
    owners, rows, log_probs = alive.nonzero()[:, 0], rows.long()[alive], beams.log_probs[alive]
    found = _on_host(owners, rows, log_probs, torch.ones_like(rows, dtype=torch.bool))
    every = verified.at(verified.accepted).followed_by(found.likeliest_first())
    answers: list[Slate | Continuation | NotFinite] = []
    counts = alive.sum(1).float()
    num_alive = (counts if search.nonfinite is None else counts + search.nonfinite).tolist()
    for b, sequence in enumerate(search.sequences):
        if math.isnan(num_alive[b]):
            answers.append(NotFinite())
            continue
        mine = every.at(every.owners == b)
        # Drop repeats: an accepted item may be a beam too, and its first place counts.
        mine = mine.at(np.sort(np.unique(mine.rows, return_index=True)[1]))
        complete = num_alive[b] < request_of(sequence, SlateQuery).width
        answers.append(
            slate_under_caps(
                sequence,
                mine.rows,
                mine.log_probs,
                complete,
                exact=False,
                ranked=False,
                log_probs=mine.log_probs,
            )
        )
    return answers


def _on_host(owners: Tensor, rows: Tensor, log_probs: Tensor, accepted: Tensor) -> VerifiedItems:
    columns = (owners, rows, log_probs.float(), accepted)
    return VerifiedItems(*(column.cpu().numpy() for column in columns))
