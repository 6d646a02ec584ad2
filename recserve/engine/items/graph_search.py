"""Beam search down the trie as one function of fixed shapes, with a forward pass for each level.

A search whose kernels are launched one by one reads sizes from the device and starts hundreds of
small operators. This one reads nothing from the device. It carries the largest possible number of
beams, scores beams that need no score, and lays out its trees on the device. It can therefore be
captured once for a number of requests and beams. A replay is one upload and one launch. Both kinds
of search give the same beams.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.core.finite import flaws_of
from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence
from recserve.engine.items.search_scorers import ExtendedBeams, LevelScorer
from recserve.kernels.trie import level_search
from recserve.kernels.trie.fixed_trie import NOWHERE, FixedTrie
from recserve.kernels.trie.level_search import DEAD, ChildQuery, child_log_probs
from recserve.kernels.trie.trie import BatchFilter, LeafBits, Trie, counted
from recserve.search.beam_search import Beams, BeamSearch
from recserve.search.filters import RequestFilters, excluded_ranks, leaf_filter
from recserve.search.strategies.beam import request_of


@dataclass(frozen=True)
class SearchShape:
    """A bucket: the largest search that one graph holds.

    Attributes:
        requests: B, most requests.
        width: W, most beams of a request.
        excluded: Most leaves that a request excludes. None allows any number, as a bitmap.
        weighed: Whether the search also scores the W best items of a dense head.
    """

    requests: int
    width: int
    excluded: int | None = 1024
    weighed: bool = False

    def holds(self, size: SearchSize) -> bool:
        """Returns whether requests of this size fit."""
        most, excluded = self.excluded, size.excluded
        return (
            size.requests <= self.requests
            and size.width <= self.width
            and (most is None or (excluded is not None and excluded <= most))
            and size.weighed == self.weighed
        )

    @property
    def name(self) -> str:
        """`8x64` for requests and beams; `8x64 weighed filtered` with dense candidates and a
        bitmap.
        """
        words = (self.weighed, " weighed"), (self.excluded is None, " filtered")
        return f"{self.requests}x{self.width}" + "".join(word for so, word in words if so)


@dataclass(frozen=True)
class SearchSize:
    """What some requests need of a bucket. The fields are those of `SearchShape`."""

    requests: int
    width: int
    excluded: int | None
    weighed: bool

    @staticmethod
    def of(requests: Seq[SlateQuery]) -> SearchSize:
        """Returns the size of requests over one trie. It reads nothing from the device."""
        hidden = requests[0].trie.removed_leaves
        excluded: int | None = None
        if all(request.allowed is None for request in requests):
            excluded = max(0 if r.excluded is None else r.excluded.size for r in requests)
            excluded += 0 if hidden is None else hidden.shape[0]
        return SearchSize(
            len(requests),
            max(request.width for request in requests),
            excluded,
            any(request.dense_weight for request in requests),
        )


@dataclass(frozen=True)
class SearchLeaves:
    """The results of a search, on the device.

    Attributes:
        paths: [B, W, L] trie nodes of each beam.
        log_probs: [B, W] of the beams, -inf where a beam is dead.
        flaws: [B] flags of the states that scored live beams, as in core/finite.py.
        dense_candidates: [B, W] log-probabilities of the dense candidates, meaningless where a
            request has fewer. None without dense candidates.
    """

    paths: Tensor
    log_probs: Tensor
    flaws: Tensor
    dense_candidates: Tensor | None = None

    def copy(self, count: int) -> SearchLeaves:
        """Returns a copy of the first requests, which the next replay does not overwrite."""
        scores = self.dense_candidates
        return SearchLeaves(
            self.paths[:count].clone(),
            self.log_probs[:count].clone(),
            self.flaws[:count].clone(),
            None if scores is None else scores[:count].clone(),
        )

    @staticmethod
    def cat(parts: Seq[SearchLeaves]) -> SearchLeaves:
        """Returns the results of several searches of the same width, one after another."""
        if len(parts) == 1:
            return parts[0]
        scores = [part.dense_candidates for part in parts if part.dense_candidates is not None]
        return SearchLeaves(
            torch.cat([part.paths for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.flaws for part in parts]),
            torch.cat(scores) if scores else None,
        )


def columns_of(widths: Seq[int], width: int) -> tuple[int, ...]:
    """Returns the number of beams at each level 0 : L + 1.

    Args:
        widths: Most children of a node of each level.
        width: Most beams.
    """
    columns = [1]
    for children in widths:
        columns.append(min(width, columns[-1] * children))
    return tuple(columns)


class FixedFilter:
    """Buffers for the excluded leaves of requests. All searches of one form share them.

    Only one search runs at a time, so that sharing is safe.

    Attributes:
        left: The filter of the largest number of requests.
    """

    def __init__(self, trie: FixedTrie, requests: int, excluded: int | None) -> None:
        """Allocates the buffers.

        Args:
            trie: The trie with room for later versions.
            requests: Most requests of a search.
            excluded: As in SearchShape.
        """
        device = trie.base.device
        self._clean = True
        if excluded is not None:
            self.left = BatchFilter(torch.full((requests, excluded), NOWHERE, device=device))
            return
        size = requests, trie.base.num_items // 32 + 1
        bits = counted(torch.full(size, -1, dtype=torch.int32, device=device))
        added = torch.full((requests, trie.capacity), NOWHERE, device=device)
        self.left = BatchFilter(bits=bits, added=added)

    def of(self, requests: int) -> BatchFilter:
        """Returns the filter of the first requests."""
        left = self.left
        if left.excluded is not None:
            return BatchFilter(left.excluded[:requests])
        assert left.bits is not None and left.added is not None
        words, counts = left.bits.words[:requests], left.bits.counts[:requests]
        return BatchFilter(bits=LeafBits(words, counts), added=left.added[:requests])

    def load(self, version: Trie, requests: Seq[SlateQuery]) -> None:
        """Writes the filters of requests over this version. Rows after the last request have no
        effect.
        """
        if (bits := self.left.bits) is not None:
            filters = tuple(leaf_filter(version, r.excluded, r.allowed) for r in requests)
            found, count = RequestFilters(version, filters).in_bits(), len(requests)
            assert found.bits is not None and self.left.added is not None
            bits.words[:count].copy_(found.bits.words)
            bits.counts[:count].copy_(found.bits.counts)
            if not self._clean:
                self.left.added.fill_(NOWHERE)
            if found.added is not None:
                self.left.added[:count, : found.added.shape[1]].copy_(found.added)
            self._clean = found.added is None
            return
        assert self.left.excluded is not None
        excluded = excluded_ranks(version, [r.excluded for r in requests], NOWHERE)
        if not self._clean:
            self.left.excluded.fill_(NOWHERE)
        if excluded is not None:
            self.left.excluded[: excluded.shape[0], : excluded.shape[1]].copy_(excluded)
        self._clean = excluded is None


class BeamSearchGraph:
    """A search of one shape over the catalogue versions that a trie has capacity for."""

    def __init__(
        self, scorer: LevelScorer, trie: FixedTrie, filters: FixedFilter, shape: SearchShape
    ) -> None:
        """Allocates the buffers that the search reads.

        Args:
            scorer: Scores the levels.
            trie: The trie with room for later versions.
            filters: The filter buffers of the form that the shape names.
            shape: The largest search.
        """
        device, rows = trie.base.device, shape.requests
        self.scorer, self.trie, self.shape = scorer, trie, shape
        size = rows, 1 + scorer.num_words
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._block = torch.zeros(size, dtype=torch.int64, device=device)
        self._filter = filters
        ids = rows, shape.width * shape.weighed, trie.base.num_levels
        self._dense_candidates = torch.full(ids, trie.base.any_leaf, device=device)
        self._last_codes = torch.tensor(trie.base.codebook_sizes, device=device) - 1
        on_cuda = device.type == "cuda" and torch.cuda.is_available()
        self._uploaded = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._put([])

    def load(self, search: BeamSearch, part: slice) -> None:
        """Uploads some requests of a search at level 0 to the buffers that the graph reads.

        They must fit the shape.
        """
        sequences, trie = search.sequences[part], search.trie
        self._put(sequences)
        self.scorer.load(sequences, search.last_hidden[part])
        self.trie.load(trie)
        self._filter.load(trie, search.requests[part])
        if search.dense_candidates is not None:
            rows = search.dense_candidates.rows[part]
            nodes = trie.nodes_of_items(rows.flatten()).view(*rows.shape, -1)
            self._dense_candidates[: rows.shape[0], : rows.shape[1]].copy_(nodes)

    def __call__(self) -> SearchLeaves:
        """Runs the search on the loaded requests."""
        trie, widths = self.trie.trie, self._block[:, 0, None]
        states = self.scorer.begin(self._block[:, 1:])
        nodes = torch.zeros_like(widths)
        log_probs = torch.zeros(nodes.shape, device=nodes.device)
        paths = nodes[..., None][..., :0]
        flaws = flaws_of(states)
        columns = columns_of(self.trie.widths, self.shape.width)
        left = self._filter.of(self.shape.requests)
        for level, children in enumerate(self.trie.widths):
            logits, normalizers = self.scorer.logits(states, level)
            num_beams = columns[level + 1]
            query = ChildQuery(nodes, log_probs, logits, children, num_beams, normalizers, left)
            found = level_search.best_children(trie, query)
            rank = torch.arange(num_beams, device=nodes.device)
            log_probs = found.log_probs.masked_fill(rank >= widths, DEAD)
            nodes = torch.where(log_probs > DEAD, found.nodes, trie.any_leaf)
            above = found.parents[..., None].expand(-1, -1, level)
            paths = torch.cat([paths.gather(1, above), nodes[..., None]], dim=-1)
            if level + 1 < trie.num_levels:
                codes = trie.codes_of(nodes).clamp(max=trie.codebook_sizes[level] - 1)
                step = ExtendedBeams(
                    level=level,
                    nodes=nodes,
                    alive=log_probs > DEAD,
                    parents=found.parents,
                    codes=codes,
                )
                states = self.scorer.deeper(states, step)
                of_beams = flaws_of(states).view(nodes.shape)
                flaws = flaws + of_beams.masked_fill(~step.alive, 0.0).sum(1)
        dense_candidates = self._dense_candidate_scores() if self.shape.weighed else None
        return SearchLeaves(paths, log_probs, flaws, dense_candidates)

    def _dense_candidate_scores(self) -> Tensor:
        """Returns [B, W] log-probabilities of the semantic ids of the dense candidates."""
        trie, (requests, count, _) = self.trie.trie, self._dense_candidates.shape
        states = self.scorer.along(
            torch.minimum(trie.codes_of(self._dense_candidates), self._last_codes)
        )
        parents = torch.zeros(requests, dtype=torch.int64, device=self._dense_candidates.device)
        total = torch.zeros(requests, count, device=parents.device)
        for level, children in enumerate(self.trie.widths):
            nodes = self._dense_candidates[..., level].reshape(parents.shape[0], -1)
            logits, normalizers = self.scorer.logits(states[level], level)
            gain = child_log_probs(trie, parents, nodes, logits, children, normalizers)
            total = total + gain.view(total.shape)
            parents = nodes.flatten()
        return total

    def account(self, sequences: Seq[SearchSequence]) -> None:
        """Adds the nodes, rounds and forward passes of the search to each request's statistics."""
        scorer = self.scorer
        for sequence in sequences:
            nodes = scorer.num_nodes(request_of(sequence))
            sequence.take_tree_slots(nodes)
            sequence.rounds += scorer.rounds
            sequence.timing.forwards += scorer.forwards
            sequence.timing.nodes += nodes

    def _put(self, sequences: Seq[SearchSequence]) -> None:
        """Uploads all requests in one copy, after the previous upload has ended."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        words, count = self._host.numpy(), len(sequences)
        for row, sequence in zip(words, sequences, strict=False):
            row[0] = request_of(sequence).width
            self.scorer.write(row[1:], sequence)
        words[count:, 0] = 0  # width 0: no beam is alive
        self.scorer.write_padding(words[count:, 1:])
        self._block.copy_(self._host, non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()


def set_leaves(search: BeamSearch, found: SearchLeaves) -> None:
    """Moves a search at level 0 to the results of a replay.

    They are copied because the next replay overwrites them.
    """
    count, candidates = len(search.sequences), search.dense_candidates
    paths, log_probs = found.paths[:count].clone(), found.log_probs[:count].clone()
    if candidates is not None and found.dense_candidates is not None:
        scores = found.dense_candidates[:count, : candidates.rows.shape[1]]
        candidates.log_probs = torch.where(candidates.valid, scores, DEAD)
    search.add_flaws(found.flaws[:count].clone())
    search.beams = Beams(search.trie.num_levels, paths[..., -1], log_probs, paths)
