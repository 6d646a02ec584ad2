"""Beam search in the trie, and the proof that a search over a draft finds the same items.

A semantic id is a path in the trie. Beam search keeps the W best paths of each length. A level
takes the children of all beams and keeps the best W of them that lead to an allowed item:

    level 0      level 1         level 2            width 2
      () -+- 3   -0.4  beam -+- 3 7   -0.9  beam
          |                  `- 3 9   -2.6
          +- 5   -1.1  beam -+- 5 1   -1.2  beam
          |                  `- 5 4   -3.0
          `- 8   -2.0  dropped

Ties go to the lower trie node, which is the lexicographically smaller semantic id. Paths added
after the trie was built (kernels/trie/trie.py) rank after all others of their level.

The children of a path follow from the target's state at its last code. One forward pass computes
the states of a token tree of paths. `search_step` goes one level deeper. It is the same function
for launched and captured searches, and for the target and a draft head (`PathScores`).

`BeamSearch` works in rounds: `propose` paths, one forward pass, `record` their states, then
either `advance` or `verify_draft`. Both run `descend`, which takes steps:

- `advance` stops at the first level on which a beam that forks has no state. All levels above it
  are those of full beam search, whoever proposed the paths.
- `verify_draft` goes on to the leaves without the paths that have no state, and proves that
  they do not matter, or names those that still could.

THEOREM. Log-probabilities are at most 0, so no item scores more than a path to it. That holds
whatever a level is normalised over: valid children, all codes of the level, all tokens. Take any
threshold, and drop any paths that are not above it. Above the threshold the search still finds
what full beam search finds: a child above it has a parent above it, and a path that is not above
it displaces nothing above it. So if k found items are above the threshold, they are the k best.

For which scorings the theorem holds: for every rule and temperature, because log-probabilities stay
at most 0, and with the tokens after an id, which only add more of them. An id that has ended waits:
its next codes are certain and add 0. It also holds if all scores are divided by the same number.
It does NOT hold for scores divided by a power of lengths that differ: a path may score less than an
item below it. The search then goes by the sums, without thresholds, and the divided scores order
what it found. Such a slate is `exact` only if the search has found every item that it allows.

The proof of a draft: the threshold is the best path that was left out for lack of a state. The
slate is proven if its k-th item is above it. Otherwise only the paths left out that reach the
k-th item can change the slate.

The threshold of a level: if levels are normalised over the valid children, a path with one item
below already has that item's score. The threshold is just below the k-th best score of such items,
so paths that tie stay. If paths above the threshold fill the whole width, the item that sets
it can still be displaced at a deeper level. In that case nothing was dropped, and the next level
computes its own threshold.

With a dense head, a path gains at most the head's weighted log-probability of its best item. The
head's own best items (`DenseCandidates`) always compete, so the threshold includes their scores.
Any other item gains at most as much as the last of them, so each path is credited with that
share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from recserve.core.finite import nonfinite_flags, without_nonfinite
from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence, stacked_last_hidden
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.host import on_device
from recserve.kernels.trie import level_search
from recserve.kernels.trie.level_search import DEAD, ChildQuery, find_keys, wanted_prefixes
from recserve.kernels.trie.native import BeamKind, NativeDescent, StateKind, passed_prefixes
from recserve.kernels.trie.trie import BatchFilter, Trie
from recserve.models.item_heads import SelfDraftHead
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.filters import RequestFilters, leaf_filter
from recserve.search.trie_paths import (
    PathDraft,
    ScoredPaths,
    draft_of_keys,
    first_scores,
    level_scores,
    path_log_probs,
    path_scores,
)

NO_THRESHOLD = 2**31  # larger than any rank
ROUNDING = 1e-4  # scores of dense candidates and of beams are summed in different orders


@dataclass(frozen=True)
class Beams:
    """W paths of the same length for each of B requests, best first.

    Attributes:
        level: Length of the paths.
        nodes: [B, W] trie node of each path, any leaf where the beam is dead.
        log_probs: [B, W], -inf where the beam is dead.
        paths: [B, W, level] trie nodes on the way to each beam, the beam's own node last.
        parents: [B, W] column of each beam's parent in the level above. None if that level is not
            the one directly above.
    """

    level: int
    nodes: Tensor
    log_probs: Tensor
    paths: Tensor
    parents: Tensor | None = None

    @staticmethod
    def root(batch: int, device: torch.device) -> Beams:
        """Returns level 0: the empty path of each request, which is trie node 0."""
        nodes = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        paths = torch.empty(batch, 1, 0, dtype=torch.int64, device=device)
        return Beams(0, nodes, torch.zeros(batch, 1, device=device), paths)

    def alive(self) -> Tensor:
        """Returns [B, W] bool: which beams are alive."""
        return self.log_probs > DEAD


@dataclass
class DenseCandidates:
    """The dense head's best items of B requests, which compete with the finished beams.

    Attributes:
        rows: [B, R] item rows, best first.
        valid: [B, R] bool, False for padding.
        dense: [B, I] log-probability of every item under the dense head.
        weights: [B, 1] weight of the dense head in each request.
        keys: [n] keys of the paths that the target must score for the candidates. None: not
            known yet.
        log_probs: [B, R] log-probabilities of the semantic ids, -inf where not valid. None until
            the paths are scored.
    """

    rows: Tensor
    valid: Tensor
    dense: Tensor
    weights: Tensor
    keys: Tensor | None = None
    log_probs: Tensor | None = None

    def flat(self) -> tuple[Tensor, Tensor]:
        """Returns request number [n] and item row [n] of the valid candidates, row by row."""
        return self.valid.nonzero()[:, 0], self.rows[self.valid]

    def among(self, rows: Tensor) -> Tensor:
        """Returns [B, n] bool: which item rows [B, n] are dense candidates of their request."""
        same = rows[:, :, None] == self.rows[:, None, :]
        return (same & self.valid[:, None, :]).any(-1)

    @cached_property
    def scores(self) -> Tensor:
        """[B, R] final scores, -inf where not valid. Requires `log_probs`."""
        assert self.log_probs is not None, "the dense candidates are not scored"
        weighed = self.weights * self.dense.gather(1, self.rows)
        return (self.log_probs + weighed).masked_fill(~self.valid, DEAD)

    @cached_property
    def share(self) -> Tensor:
        """[B, 1] upper bound of what the dense head adds to the score of any other item.

        Candidates are the head's best items, so the bound is the weighted log-probability of the
        last one.
        """
        last = self.dense.gather(1, self.rows).masked_fill(~self.valid, float("inf"))
        return (self.weights * last.amin(1, True)).masked_fill(self.weights == 0, 0.0)


@dataclass(eq=False)
class BeamSearch:
    """Beam search of B requests over one catalogue version.

    Attributes:
        model: The target.
        sequences: The requests.
        requests: Their queries.
        trie: The catalogue version.
        filters: Filter of each request.
        last_hidden: [B, E] state of the last prefix token.
        scored: Paths that the target has scored.
        beams: The deepest level that is proven to be that of full beam search.
        widths: Beam width of each request.
        threshold_ranks: Rank, from 0, of the score that sets the threshold of a level. None: no
            request has one.
        dense_candidates: Items that compete with the finished beams. None: there are none.
        nonfinite: [B] flags of the states behind the beams (core/finite.py). None: all states are
            finite.
        unscored_keys: [n] keys of paths that the draft lacked and that could change the slate,
            each with all paths above it. None: propose whatever the beams lack.
        extra_rounds: Rounds that scored paths that the draft lacked.
    """

    model: SemanticIdModel
    sequences: tuple[SearchSequence, ...]
    requests: list[SlateQuery]
    trie: Trie
    filters: RequestFilters
    last_hidden: Tensor
    scored: ScoredPaths
    beams: Beams
    widths: list[int]
    threshold_ranks: list[int] | None = None
    dense_candidates: DenseCandidates | None = None
    nonfinite: Tensor | None = None
    unscored_keys: Tensor | None = None
    extra_rounds: int = 0

    @staticmethod
    def start(
        model: SemanticIdModel,
        sequences: Seq[SearchSequence],
        thresholds: bool,
        filtered: bool = True,
    ) -> BeamSearch:
        """Returns a search at level 0, the empty path of each request.

        Args:
            model: The target.
            sequences: The requests, all over one trie.
            thresholds: Whether paths below the threshold of a level may be dropped. Levels must
                be normalised over the valid children.
            filtered: Whether the requests' filters apply.
        """
        requests = [s.request for s in sequences if isinstance(s.request, SlateQuery)]
        trie, last_hidden, nonfinite = requests[0].trie, stacked_last_hidden(sequences), None
        if last_hidden.is_cuda:  # on a CPU the scheduler has checked already
            nonfinite = _prefix_flags(sequences, last_hidden)
            last_hidden = without_nonfinite(last_hidden, nonfinite)
        filters = [leaf_filter(trie, r.excluded, r.allowed) if filtered else None for r in requests]
        return BeamSearch(
            model=model,
            sequences=tuple(sequences),
            requests=requests,
            trie=trie,
            filters=RequestFilters(trie, tuple(filters)),
            last_hidden=last_hidden,
            scored=ScoredPaths.empty(last_hidden),
            beams=Beams.root(len(sequences), last_hidden.device),
            widths=[request.width for request in requests],
            threshold_ranks=threshold_ranks(requests) if thresholds else None,
            nonfinite=nonfinite,
        )

    @property
    def skip_single(self) -> bool:
        """True if paths with one child need no state."""
        return self.model.config.normalization == "children"

    @property
    def is_finished(self) -> bool:
        """True when the beams are leaves.

        Dead beams also advance, because checking for them costs more.
        """
        return self.beams.level == self.trie.num_levels

    def keys(self, nodes: Tensor) -> Tensor:
        """Returns the keys of trie nodes [B, ...], in the same shape."""
        owners = torch.arange(nodes.shape[0], device=nodes.device)
        owners = owners.view(-1, *[1] * (nodes.ndim - 1))
        return owners * self.trie.num_nodes + nodes

    def needs_state(self, beams: Beams) -> Tensor:
        """Returns [B, W] bool: live beams whose children depend on a state."""
        alive = beams.alive()
        return alive & (self.trie.num_children(beams.nodes) > 1) if self.skip_single else alive

    def propose(self, level_offsets: Tensor, extra: Tensor | None = None) -> PathDraft:
        """Returns trees of all unscored nodes on the way to the beams that need a state.

        Few paths fork below the trie's `closing_level`, and a round costs more than a few nodes.
        From that level on, all forks below the beams are scored together with the beams, so that
        few requests need another round.

        Args:
            level_offsets: [L] first token of each level.
            extra: [n] keys of further nodes to score, each with all nodes above it.
        """
        beams, trie = self.beams, self.trie
        closing = self.skip_single and beams.level >= trie.closing_level
        which = (
            BeamKind.OPEN if closing else BeamKind.FORKED if self.skip_single else BeamKind.ALIVE
        )
        below = self.widths if closing else [0] * len(self.widths)
        keys = wanted_prefixes(trie, beams.log_probs, beams.paths, which, self.scored.keys, below)
        if extra is not None:
            keys = torch.cat([keys, extra])
        return self.lay_out(keys, level_offsets)

    def lay_out(self, keys: Tensor, level_offsets: Tensor) -> PathDraft:
        """Returns the paths of keys [n] as token trees. Scored ones are not computed again."""
        return draft_of_keys(self.trie, keys, len(self.sequences), level_offsets, self.scored)

    def record(self, draft: PathDraft, slots: Tensor, hidden: Tensor) -> None:
        """Adds the states of a draft to the scored paths.

        Args:
            draft: The draft that the forward pass computed.
            slots: [T] pool slot of every node.
            hidden: [Tq, E] states of the computed nodes.
        """
        keys, slots = draft.keys_and_slots(slots)
        if hidden.is_cuda:  # on a CPU the scheduler has checked already
            nonfinite = nonfinite_flags(hidden)
            hidden, owners = without_nonfinite(hidden, nonfinite), keys // self.trie.num_nodes
            self.add_nonfinite(
                nonfinite.new_zeros(len(self.sequences)).index_add(0, owners, nonfinite)
            )
        self.scored = self.scored.add(keys, slots, hidden)

    def add_nonfinite(self, nonfinite: Tensor) -> None:
        """Adds flags [B] of states that the beams depend on."""
        self.nonfinite = nonfinite if self.nonfinite is None else self.nonfinite + nonfinite

    def advance(self, until: int | None = None) -> None:
        """Moves to the deepest level above which all states are known, at most to level `until`."""
        scores = TargetScores(self.model, LaunchedStates(self))
        self.beams = descend(self, scores, until=until, stop_at_unscored=True).last

    def verify_draft(self) -> Descent:
        """Searches over the scored paths only. See the proof of a draft above.

        With caps or a dense head, the slate is proven only if no state is missing.
        """
        ranks = [NO_THRESHOLD if r.caps or r.dense_weight else r.k - 1 for r in self.requests]
        return descend(self, TargetScores(self.model, LaunchedStates(self)), item_ranks=ranks)

    @property
    def has_thresholds(self) -> bool:
        """True if a request has thresholds and all dense candidates, which set them, are scored."""
        candidates = self.dense_candidates
        scored = candidates is None or candidates.log_probs is not None
        return scored and self.threshold_ranks is not None

    @cached_property
    def widths_on_device(self) -> Tensor:
        """[B, 1] the beam widths."""
        return on_device(self.widths, self.last_hidden.device)[:, None]

    @cached_property
    def ranks_on_device(self) -> Tensor:
        """[B, 1] the threshold ranks."""
        assert self.threshold_ranks is not None
        return on_device(self.threshold_ranks, self.last_hidden.device)[:, None]

    def space(self) -> SearchSpace:
        """Returns what the next steps read, in exact sizes."""
        most = max(self.widths)
        return SearchSpace(
            self.trie,
            self.filters.batch,
            most,
            self.widths_on_device if min(self.widths) < most else None,
            partial(_drop_below_threshold, self) if self.has_thresholds else None,
        )


def _prefix_flags(sequences: Seq[SearchSequence], last_hidden: Tensor) -> Tensor:
    """Returns [B] flags of the prefixes' last states [B, E] and of the placeholders' states."""
    placeholder_states = [
        s.placeholder_states
        for s in sequences
        if s.placeholders is not None and s.placeholder_states is not None
    ]
    nonfinite = nonfinite_flags(last_hidden)
    return (
        nonfinite + nonfinite_flags(torch.stack(placeholder_states))
        if placeholder_states
        else nonfinite
    )


def descend(
    search: BeamSearch,
    scores: PathScores,
    *,
    until: int | None = None,
    stop_at_unscored: bool = False,
    item_ranks: Seq[int] = (),
) -> Descent:
    """Expands the beams of a search level by level. It does not change the search.

    On a CPU all levels are one call of C. The loop here is its reference, and runs on a GPU.

    Args:
        search: The requests, and the beams to start from.
        scores: Whose log-probabilities the search follows.
        until: Level to reach. None: the leaves.
        stop_at_unscored: Whether to stop at the first level that lacks a state. Otherwise beams
            without a state have no children.
        item_ranks: Rank, from 0, of the found item whose score the proof of each request needs.
    """
    until = search.trie.num_levels if until is None else until
    if (native := native_of(search, scores)) is not None:
        return DescentInC(search, scores, native, item_ranks, until, stop_at_unscored)
    descent, beams, space = DescentInTorch(search, item_ranks), search.beams, search.space()
    while beams.level < until:
        unscored = scores.find_unscored(beams)
        if unscored is not None and stop_at_unscored:
            break
        descent.levels.append((beams, unscored))
        if unscored is not None:
            beams = replace(beams, log_probs=beams.log_probs.masked_fill(unscored, DEAD))
        beams = search_step(space, beams, scores)
    descent.last = beams
    return descent


def native_of(search: BeamSearch, scores: PathScores) -> NativeDescent | None:
    """Returns the C function that searches by these scores, None where torch does."""
    return scores.native if backend_of(search.last_hidden) is Backend.C else None


@dataclass(eq=False)
class SearchSpace:
    """What the steps of a search read, besides beams and scores.

    A launched search has exact sizes. A captured one has those of its graph.

    Attributes:
        trie: The catalogue version.
        filters: Leaves that the requests allow.
        most_beams: Most beams of a request.
        widths: [B, 1] beam width of each request. None: all have `most_beams`.
        drop: Takes nodes [B, n] of a level and their log-probabilities [B, n]. Returns the latter
            with -inf below the threshold of the level. None: there is no threshold.
    """

    trie: Trie
    filters: BatchFilter
    most_beams: int
    widths: Tensor | None = None
    drop: Callable[[Tensor, Tensor], Tensor] | None = None


def search_step(space: SearchSpace, beams: Beams, scores: PathScores) -> Beams:
    """Returns the beams of the next level: the best allowed children of each request.

    All children of all beams are computed at once, dead ones too, without waiting for the device:
    the shapes follow from host values only. Children past the beam width or below the threshold
    are dead.

    Args:
        space: Where the children are, and how many are kept.
        beams: The parents. Those without a state are dead.
        scores: Whose log-probabilities the search follows.
    """
    trie, children = space.trie, space.trie.widths[beams.level]
    logits, normalizers = scores.logits(beams)
    query = ChildQuery(
        nodes=beams.nodes,
        log_probs=beams.log_probs,
        logits=logits,
        width=children,
        keep=min(space.most_beams, beams.nodes.shape[1] * children),
        normalizers=normalizers,
        filters=space.filters,
    )
    found = level_search.best_children(trie, query)
    log_probs = found.log_probs
    if space.widths is not None:
        rank = torch.arange(log_probs.shape[1], device=log_probs.device)
        log_probs = log_probs.masked_fill(rank >= space.widths, DEAD)
    if space.drop is not None:
        log_probs = space.drop(found.nodes, log_probs)
    nodes = torch.where(log_probs > DEAD, found.nodes, trie.any_leaf)
    # A path is the parent's path and the chosen node.
    above = found.parents[..., None].expand(-1, -1, beams.level)
    paths = torch.cat([beams.paths.gather(1, above), nodes[..., None]], dim=-1)
    return Beams(beams.level + 1, nodes, log_probs, paths, found.parents)


def threshold_ranks(requests: Seq[SlateQuery]) -> list[int] | None:
    """Returns the rank, from 0, of the score that sets the threshold of each request.

    The rank is NO_THRESHOLD if k equals the beam width, or if caps admit items of lower scores.

    Returns:
        None if no request has a threshold.
    """
    ranks = [r.k - 1 if r.k < r.width and not r.caps else NO_THRESHOLD for r in requests]
    return None if min(ranks) == NO_THRESHOLD else ranks


def _drop_below_threshold(search: BeamSearch, nodes: Tensor, log_probs: Tensor) -> Tensor:
    """Returns log_probs [B, n] with -inf for paths [B, n] below the threshold of their level."""
    ranks = search.ranks_on_device
    below, candidates = search.trie.leaves(nodes), search.dense_candidates
    single = below.last - below.first == 1
    if candidates is None:
        known = torch.where(single, log_probs, DEAD)
        return log_probs.masked_fill(log_probs < value_at(known, ranks), DEAD)
    # The first leaf below is the item of a single path; other entries are not used.
    rows = search.trie.leaf_rows[below.first].long()
    scores = log_probs + candidates.weights * candidates.dense.gather(1, rows)
    known = torch.where(single & ~candidates.among(rows), scores, DEAD)
    threshold = value_at(torch.cat([known, candidates.scores], dim=1), ranks)
    return log_probs.masked_fill(log_probs + candidates.share < threshold - ROUNDING, DEAD)


def value_at(values: Tensor, ranks: Tensor) -> Tensor:
    """Returns [B, 1] the value at each row's rank, largest first, -inf past the last."""
    ranked = values.sort(dim=1, descending=True).values
    size = values.shape[1]
    ranked = ranked.gather(1, ranks.clamp(max=size - 1))
    return ranked.masked_fill(ranks >= size, DEAD)


class Descent(ABC):
    """The levels that one descent passed, and what they prove.

    Attributes:
        last: The deepest level that was reached.
    """

    last: Beams

    @property
    def proven(self) -> bool:
        """True if the item at each request's rank is above the threshold of the draft.

        The threshold is the best path left out for lack of a state. The host waits once for the
        device if there was one.
        """
        for item, threshold in self.margins():
            if item <= threshold and threshold > DEAD:
                return False
        return True

    @abstractmethod
    def margins(self) -> Iterable[tuple[float, float]]:
        """Returns the score of each request's item, and its threshold, -inf if it has none."""

    @abstractmethod
    def path_keys(self, which: StateKind) -> Tensor:
        """Returns keys [n] of paths above the last level that reach their request's item.

        Args:
            which: KNOWN for paths whose state was needed and there, MISSING for those whose
                state was needed and not there, ANY for all.

        Returns:
            The keys. With a path come all paths above it.
        """


class DescentInTorch(Descent):
    """What `descend` passed in torch.

    Attributes:
        levels: The levels above the last one, and which of their beams [B, W] were left out.
    """

    def __init__(self, search: BeamSearch, item_ranks: Seq[int]) -> None:
        self.search, self.item_ranks = search, item_ranks
        self.levels: list[tuple[Beams, Tensor | None]] = []

    def margins(self) -> Iterable[tuple[float, float]]:
        """As in `Descent`."""
        left_out = [
            beams.log_probs.masked_fill(~unscored, DEAD).amax(1, keepdim=True)
            for beams, unscored in self.levels
            if unscored is not None
        ]
        if not left_out:
            return ()
        thresholds = torch.cat(left_out, 1).amax(1, keepdim=True)
        return torch.cat([self._item_scores, thresholds], 1).tolist()

    def path_keys(self, which: StateKind) -> Tensor:
        """As in `Descent`."""
        nothing = self.search.beams.nodes[:0, 0]
        keys, chosen = [nothing], [nothing.bool()]
        for beams, unscored in self.levels:
            if which == StateKind.MISSING:
                if unscored is None:
                    continue
                wanted = unscored
            elif which == StateKind.KNOWN:
                wanted = self.search.needs_state(beams)
                wanted = wanted if unscored is None else wanted & ~unscored
            else:
                wanted = beams.alive()
            wanted = wanted & (beams.log_probs >= self._item_scores)
            keys.append(self.search.keys(beams.paths).flatten())
            chosen.append(wanted[..., None].expand_as(beams.paths).flatten())
        return torch.cat(keys)[torch.cat(chosen)]

    @cached_property
    def _item_scores(self) -> Tensor:
        """[B, 1] score of the item at each request's rank."""
        ranks = on_device(self.item_ranks, self.last.nodes.device)[:, None]
        return value_at(self.last.log_probs, ranks)


class DescentInC(Descent):
    """What `descend` passed in C."""

    def __init__(
        self,
        search: BeamSearch,
        scores: PathScores,
        native: NativeDescent,
        item_ranks: Seq[int],
        until: int,
        stops: bool,
    ) -> None:
        """Searches. The arguments are those of `descend`."""
        self.search, self.item_ranks, self.last = search, item_ranks, search.beams
        candidates, by_target = search.dense_candidates, scores.contexts is None
        ranks = search.threshold_ranks if search.has_thresholds else None
        ranks = ranks or [NO_THRESHOLD] * len(search.widths)
        self.levels = levels = native(
            search.trie,
            search.beams.log_probs,
            search.beams.paths,
            search.last_hidden,
            until,
            widths=search.widths,
            threshold_ranks=[-1 if rank == NO_THRESHOLD else rank for rank in ranks],
            filters=search.filters.each,
            scored_keys=search.scored.keys if by_target else None,
            scored_hidden=search.scored.hidden if by_target else None,
            contexts=scores.contexts,
            dense_candidates=(
                None if candidates is None or candidates.log_probs is None else candidates
            ),
            stops=stops,
        )
        level = levels.reached
        if level > self.last.level:
            width = levels.used[level]
            paths = levels.paths[level, :, :width, :level]
            log_probs = levels.log_probs[level, :, :width]
            self.last = Beams(level, paths[..., level - 1], log_probs, paths)

    def margins(self) -> Iterable[tuple[float, float]]:
        """As in `Descent`."""
        return zip(self._item_scores, self.levels.thresholds, strict=True)

    def path_keys(self, which: StateKind) -> Tensor:
        """As in `Descent`."""
        first, nodes = self.search.beams.level, self.search.trie.num_nodes
        return passed_prefixes(self.levels, first, nodes, which, self._item_scores)

    @cached_property
    def _item_scores(self) -> list[float]:
        """[B] score of the item at each request's rank."""
        width = self.last.log_probs.shape[1]
        ranked = zip(self.last.log_probs.tolist(), self.item_ranks, strict=True)
        return [scores[rank] if rank < width else DEAD for scores, rank in ranked]


class PathScores(Protocol):
    """Whose log-probabilities one search follows: those of the target or of a draft head."""

    @property
    def native(self) -> NativeDescent | None:
        """The same search in C. None: there is none."""
        ...

    @property
    def contexts(self) -> Tensor | None:
        """[B, L, E] that a draft head reads at each level. None for the target."""
        ...

    @property
    def states(self) -> Tensor | None:
        """[B * W, E] states behind the latest logits. None before the first ones."""
        ...

    def find_unscored(self, beams: Beams) -> Tensor | None:
        """Returns [B, W] bool: beams whose children need a state that is missing. None: no beam."""
        ...

    def logits(self, beams: Beams) -> tuple[Tensor, Tensor | None]:
        """Returns the logits of the beams' children, and their normalisers, as `level_scores` does.

        A launched search has called `find_unscored` for the same beams. Any finite row will do
        where no state is needed.
        """
        ...

    def of_paths(self, owners: Tensor, nodes: Tensor) -> Tensor:
        """Returns [n] log-probabilities of the paths nodes [n, L] of requests owners [n]."""
        ...


class PathStates(Protocol):
    """Where a search gets the target's states.

    Here launched and captured searches differ. A launched search looks up states that rounds have
    computed, only those that are needed (`LaunchedStates`). The host reads their number. A captured
    search may read nothing, so each step computes the states of all beams
    (`engine/beam_search_graph.py`).
    """

    def find_unscored(self, beams: Beams) -> Tensor | None:
        """Returns [B, W] bool: beams whose children need a state that is missing. None: no beam."""
        ...

    def of_beams(self, beams: Beams) -> Tensor:
        """Returns [B * W, E] the states of the beams, any where none is needed."""
        ...

    def of_paths(self, owners: Tensor, nodes: Tensor) -> Tensor:
        """Returns [n] log-probabilities of the paths nodes [n, L] of requests owners [n]."""
        ...


class TargetScores:
    """The target's log-probabilities."""

    contexts = None

    def __init__(self, model: SemanticIdModel, path_states: PathStates) -> None:
        self.model, self.native = model, model.search
        self.find_unscored, self.of_paths = path_states.find_unscored, path_states.of_paths
        self.states: Tensor | None = None
        self._path_states = path_states

    def logits(self, beams: Beams) -> tuple[Tensor, Tensor | None]:
        """As in `PathScores`."""
        self.states = self._path_states.of_beams(beams)
        return level_scores(self.model, self.states, beams.level)


class LaunchedStates:
    """The states of a launched search: those that rounds have computed."""

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self._rows: Tensor | None = None

    def find_unscored(self, beams: Beams) -> Tensor | None:
        """Looks the beams up in the scored paths. The host waits once for the device.

        Level 0 has the state of the last prefix token.
        """
        if not beams.level:
            return None
        self._rows = find_keys(self.search.scored.keys, self.search.keys(beams.nodes))
        unscored = self.search.needs_state(beams) & (self._rows < 0)
        return unscored if bool(unscored.any()) else None

    def of_beams(self, beams: Beams) -> Tensor:
        """As in `PathStates`."""
        scored, states = self.search.scored, self.search.last_hidden
        if self._rows is None:
            return states
        table = scored.hidden if scored.keys.shape[0] else states
        return table[self._rows.flatten().clamp(min=0)]

    def of_paths(self, owners: Tensor, nodes: Tensor) -> Tensor:
        """As in `PathStates`. All nodes on the paths that need a state are scored."""
        search, scored = self.search, self.search.scored
        first = first_scores(search.trie, nodes, owners, search.last_hidden, search.model)
        return first + path_scores(
            search.trie, nodes, owners, scored.keys, scored.hidden, search.model
        )


class HeadScores:
    """A draft head's own log-probabilities. The head carries a state along each beam."""

    def __init__(
        self, trie: Trie, head: SelfDraftHead, last_hidden: Tensor, contexts: Tensor
    ) -> None:
        """Begins a search.

        Args:
            trie: The catalogue version.
            head: The draft head.
            last_hidden: [B, E] state of the last prefix token.
            contexts: [B, L, E] what the head reads at each level besides its state.
        """
        self.trie, self.head, self.last_hidden, self.contexts = trie, head, last_hidden, contexts
        self.native = head.search
        self.states: Tensor | None = None

    def find_unscored(self, beams: Beams) -> None:
        """Returns None: the head needs no states of the target."""

    def logits(self, beams: Beams) -> tuple[Tensor, Tensor | None]:
        """As in `PathScores`."""
        states = self._states_of_paths(beams) if self.states is None else self._deeper(beams)
        self.states = states
        context = self.contexts[:, beams.level].repeat_interleave(beams.nodes.shape[1], 0)
        return self.head.level_logits(context, states, beams.level), None

    def of_paths(self, owners: Tensor, nodes: Tensor) -> Tensor:
        """As in `PathScores`."""
        return path_log_probs(self.trie, nodes, self._logits_along(owners, nodes))

    def _logits_along(self, owners: Tensor, nodes: Tensor) -> Iterator[tuple[Tensor, None]]:
        """Yields the logits at each node of given paths, from node 0 on."""
        state, contexts = self.last_hidden[owners], self.contexts[owners].unbind(1)
        last = len(contexts) - 1
        for level, (own, context) in enumerate(zip(nodes.unbind(1), contexts, strict=True)):
            yield self.head.level_logits(context, state, level), None
            if level < last:
                state = self.head.step(level, state, self._codes(own, level))

    def _states_of_paths(self, beams: Beams) -> Tensor:
        """Returns the states after the codes of each beam."""
        states, width = self.last_hidden, beams.nodes.shape[1]
        if width > 1:
            states = states[:, None].expand(-1, width, -1).flatten(0, 1)
        for level in range(beams.level):
            states = self.head.step(level, states, self._codes(beams.paths[..., level], level))
        return states

    def _deeper(self, beams: Beams) -> Tensor:
        """Returns the states of all beams from those of the level above.

        Dead beams are included: to count the live ones, the host would have to wait for the device.
        """
        assert self.states is not None and beams.parents is not None
        batch, level = beams.nodes.shape[0], beams.level - 1
        owners = torch.arange(batch, device=beams.nodes.device)[:, None]
        # The states are packed, so columns of parents become row numbers.
        parents = (owners * (self.states.shape[0] // batch) + beams.parents).flatten()
        return self.head.step(level, self.states[parents], self._codes(beams.nodes, level))

    def _codes(self, nodes: Tensor, level: int) -> Tensor:
        """Returns [n] the last codes of paths with n nodes, clamped to the codebook.

        A dead beam points to a leaf, whose code may lie outside the level's codebook.
        """
        return self.trie.codes_of(nodes.flatten()).clamp(max=self.trie.codebook_sizes[level] - 1)
