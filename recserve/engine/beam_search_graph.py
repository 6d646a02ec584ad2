"""Searches captured as CUDA graphs for a catalogue, one for each bucket of requests and beams.

A captured search takes the same steps as a launched one (`search_step` in search/beam_search.py),
in fixed shapes. A launched search reads sizes from the device and starts hundreds of small
operators. A captured one reads nothing from the device. It carries the largest possible number of
beams, scores beams that need no score, and lays out its trees on the device. It can therefore be
captured once for a number of requests and beams. A replay is one upload and one launch. Both kinds
of search give the same beams. A search that fits no bucket launches its kernels one by one.

The file tells first what runs (`BeamSearchGraph.__call__`), then what it reads, then its shapes,
and last how a graph is chosen (`BeamSearchGraphs`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.finite import nonfinite_flags
from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence, request_of
from recserve.engine.capture import (
    CapturedGraph,
    CaptureLimits,
    CudaRecorder,
    GraphSet,
    Recorder,
    is_cuda,
)
from recserve.engine.kv_cache import KVCache
from recserve.engine.runner import Runner
from recserve.engine.scheduler import StepLock
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.kernels.trie.fixed_trie import CAPACITY, NOWHERE, FixedTrie
from recserve.kernels.trie.level_search import DEAD
from recserve.kernels.trie.trie import BatchFilter, LeafBits, Trie, count_leaves
from recserve.models.item_heads import SelfDraftHead
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.beam_search import (
    Beams,
    BeamSearch,
    HeadScores,
    PathScores,
    SearchSpace,
    TargetScores,
    search_step,
)
from recserve.search.dense_candidates import add_candidates
from recserve.search.filters import RequestFilters, excluded_ranks, leaf_filter
from recserve.search.trie_paths import level_scores, path_log_probs

Words = NDArray[np.int64]
DEAD_LEAF = 2**40  # larger than every leaf rank: nodes of dead beams have no relatives


@dataclass(frozen=True)
class SearchLeaves:
    """The results of a search, on the device.

    Attributes:
        paths: [B, W, L] trie nodes of each beam.
        log_probs: [B, W] of the beams, -inf where a beam is dead.
        nonfinite: [B] flags of the states that scored live beams, as in core/finite.py.
        dense_candidates: [B, W] log-probabilities of the dense candidates, meaningless where a
            request has fewer. None without dense candidates.
    """

    paths: Tensor
    log_probs: Tensor
    nonfinite: Tensor
    dense_candidates: Tensor | None = None

    def copy(self, count: int) -> SearchLeaves:
        """Returns a copy of the first requests, which the next replay does not overwrite."""
        scores = self.dense_candidates
        return SearchLeaves(
            self.paths[:count].clone(),
            self.log_probs[:count].clone(),
            self.nonfinite[:count].clone(),
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
            torch.cat([part.nonfinite for part in parts]),
            torch.cat(scores) if scores else None,
        )


class BeamSearchGraph(CapturedGraph[SearchLeaves]):
    """A search of one shape over the catalogue versions that a trie has capacity for."""

    bucket: SearchBucket

    def __init__(
        self, inputs: ScoreInputs, trie: FixedTrie, filters: FixedFilter, bucket: SearchBucket
    ) -> None:
        """Allocates the buffers that the search reads.

        Args:
            inputs: What the search scores with.
            trie: The trie with room for later versions.
            filters: The filter buffers of the form that the bucket's shape names.
            bucket: The strategy, and the largest search.
        """
        shape = bucket.shape
        device, rows = trie.base.device, shape.requests
        self.inputs, self.trie, self.bucket, self.shape = inputs, trie, bucket, shape
        size = rows, 1 + inputs.num_words
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._block = torch.zeros(size, dtype=torch.int64, device=device)
        self._filter = filters
        widths = self._block[:, 0, None]
        self._space = SearchSpace(trie.trie, filters.of(rows), shape.width, widths)
        ids = rows, shape.width * shape.weighed, trie.base.num_levels
        self._dense_candidates = torch.full(ids, trie.base.any_leaf, device=device)
        self._owners = torch.arange(rows, device=device).repeat_interleave(ids[1])
        self._upload_end = torch.cuda.Event() if is_cuda(device) else None  # type: ignore[no-untyped-call]
        self._put([])

    def __call__(self) -> SearchLeaves:
        """Runs the search on the loaded requests."""
        trie, requests = self.trie.trie, self.shape.requests
        scores = self.inputs.scores(self._block[:, 1:])
        beams = Beams.root(requests, self._block.device)
        nonfinite = torch.zeros(requests, device=self._block.device)
        while beams.level < trie.num_levels:
            deeper = search_step(self._space, beams, scores)
            assert scores.states is not None
            of_beams = nonfinite_flags(scores.states).view(beams.nodes.shape)
            nonfinite = nonfinite + of_beams.masked_fill(~beams.alive(), 0.0).sum(1)
            beams = deeper
        dense_candidates = None
        if self.shape.weighed:
            paths = self._dense_candidates
            log_probs = scores.of_paths(self._owners, paths.flatten(0, 1))
            dense_candidates = log_probs.view(paths.shape[:2])
        return SearchLeaves(beams.paths, beams.log_probs, nonfinite, dense_candidates)

    def load(self, search: BeamSearch, part: slice) -> None:
        """Uploads some requests of a search at level 0 to the buffers that the graph reads.

        They must fit the shape.
        """
        sequences, trie = search.sequences[part], search.trie
        self._put(sequences)
        self.inputs.load(sequences, search.last_hidden[part])
        self.trie.load(trie)
        self._filter.load(trie, search.requests[part])
        if search.dense_candidates is not None:
            rows = search.dense_candidates.rows[part]
            nodes = trie.nodes_of_items(rows.flatten()).view(*rows.shape, -1)
            self._dense_candidates[: rows.shape[0], : rows.shape[1]].copy_(nodes)

    def account(self, sequences: Seq[SearchSequence]) -> None:
        """Adds the nodes, rounds and forward passes of the search to each request's statistics."""
        inputs = self.inputs
        for sequence in sequences:
            nodes = inputs.num_nodes(request_of(sequence, SlateQuery))
            sequence.take_tree_slots(nodes)
            sequence.rounds += inputs.rounds
            sequence.timing.forwards += inputs.forwards
            sequence.timing.nodes += nodes

    def _put(self, sequences: Seq[SearchSequence]) -> None:
        """Uploads all requests in one copy, after the previous upload has ended."""
        if self._upload_end is not None:
            self._upload_end.synchronize()
        words, count = self._host.numpy(), len(sequences)
        for row, sequence in zip(words, sequences, strict=False):
            row[0] = request_of(sequence, SlateQuery).width
            self.inputs.write(row[1:], sequence)
        words[count:, 0] = 0  # width 0: no beam is alive
        self.inputs.write_padding(words[count:, 1:])
        self._block.copy_(self._host, non_blocking=True)
        if self._upload_end is not None:
            self._upload_end.record()


class ScoreInputs(Protocol):
    """The buffers that the scores of a captured search are computed from.

    Attributes:
        num_words: Number of int64 values of a request that are read on the device.
        rounds: Rounds that a result reports.
        forwards: Forward passes of the target model.
    """

    num_words: int
    rounds: int
    forwards: int

    def scores(self, words: Tensor) -> PathScores:
        """Returns the scores of a search from the empty prefixes on. words is [B, num_words]."""
        ...

    def num_nodes(self, request: SlateQuery) -> int:
        """Returns how many nodes of the target a search computes for a request, in its own
        slots.
        """
        ...

    def write(self, words: Words, sequence: SearchSequence) -> None:
        """Writes the values of a request to words [num_words], on the host."""
        ...

    def write_padding(self, words: Words) -> None:
        """Writes the values of missing requests to words [n, num_words]."""
        ...

    def load(self, sequences: Seq[SearchSequence], last_hidden: Tensor) -> None:
        """Copies states that are on the device into the buffers. last_hidden is [n, E]."""
        ...


class HeadInputs:
    """What the recurrent self-draft head reads: the prefix's last state and placeholder states."""

    num_words = 0
    rounds = 1
    forwards = 0

    def __init__(self, head: SelfDraftHead, trie: FixedTrie, requests: int) -> None:
        self.head, self.trie = head, trie
        weight, levels = head.head.weight, len(head.config.codebook_sizes)
        self._last_hidden = weight.new_zeros(requests, weight.shape[1])
        self._contexts = weight.new_zeros(requests, levels, weight.shape[1])

    def scores(self, words: Tensor) -> HeadScores:
        """As ScoreInputs."""
        return HeadScores(self.trie.trie, self.head, self._last_hidden, self._contexts)

    def num_nodes(self, request: SlateQuery) -> int:
        """As ScoreInputs."""
        return 0

    def write(self, words: Words, sequence: SearchSequence) -> None:
        """As ScoreInputs."""

    def write_padding(self, words: Words) -> None:
        """As ScoreInputs."""

    def load(self, sequences: Seq[SearchSequence], last_hidden: Tensor) -> None:
        """As ScoreInputs."""
        count = len(sequences)
        self._last_hidden[:count].copy_(last_hidden)
        if self.head.config.placeholders:
            placeholder_states = [
                s.placeholder_states for s in sequences if s.placeholder_states is not None
            ]
            torch.stack(placeholder_states, out=self._contexts[:count])
        else:
            self._contexts.copy_(self._last_hidden[:, None])


TREE = 2  # values of a request before the slots of its tree


class TargetInputs:
    """What the target model reads: the trees of all levels under the cached prefixes.

    The values of a request are its row of the slot table and the length of its prefix. Then follow
    one slot for each column of each level except the last, and one for each code except the last of
    each dense candidate. Columns past the request's own slots use the pool's spare slot.
    """

    def __init__(
        self,
        model: SemanticIdModel,
        runner: Runner,
        kv: KVCache,
        trie: FixedTrie,
        shape: SearchShape,
    ) -> None:
        """Allocates the buffers of searches of a shape."""
        widths = trie.trie.widths
        columns = [1]  # beams at each level
        for children in widths[:-1]:
            columns.append(min(shape.width, columns[-1] * children))
        self.model, self.runner, self.kv, self.trie = model, runner, kv, trie
        self.columns = tuple(columns[1:])
        self.dense_candidates = shape.width * shape.weighed
        self.rounds = self.forwards = len(self.columns)
        self.num_words = TREE + sum(self.columns) + self.dense_candidates * len(self.columns)
        weight = model.tokens.weight
        self.last_hidden = weight.new_zeros(shape.requests, weight.shape[1])
        self.rows = torch.arange(shape.requests, device=weight.device)

    def scores(self, words: Tensor) -> TargetScores:
        """As ScoreInputs."""
        return TargetScores(self.model, CapturedStates(self, words))

    def num_nodes(self, request: SlateQuery) -> int:
        """As ScoreInputs."""
        return sum(count for _, count in self._slot_counts(request))

    def _slot_counts(self, request: SlateQuery) -> list[tuple[int, int]]:
        """Returns the columns of each level and how many of them, from the first, can be alive.

        The last pair is that of the dense candidates.
        """
        sizes = request.trie.level_sizes[1:]
        counts = [
            (columns, min(columns, nodes, request.width))
            for columns, nodes in zip(self.columns, sizes, strict=False)
        ]
        dense_candidates = min(self.dense_candidates, request.width) if request.dense_weight else 0
        return [
            *counts,
            (self.dense_candidates * len(self.columns), dense_candidates * len(self.columns)),
        ]

    def write(self, words: Words, sequence: SearchSequence) -> None:
        """As ScoreInputs."""
        rows = sequence.prefix_length
        words[:TREE] = sequence.row, rows
        own = self.kv.slots_of(sequence.pages[self.kv.pages_of(rows) :])[sequence.tree_used :]
        column, used = TREE, 0
        words[column:] = self.runner.pool.spare_slot
        for columns, count in self._slot_counts(request_of(sequence, SlateQuery)):
            words[column : column + count] = own[used : used + count]
            column, used = column + columns, used + count

    def write_padding(self, words: Words) -> None:
        """As ScoreInputs."""
        words[:, :TREE] = 0
        words[:, TREE:] = self.runner.pool.spare_slot

    def load(self, sequences: Seq[SearchSequence], last_hidden: Tensor) -> None:
        """As ScoreInputs."""
        self.last_hidden[: len(sequences)].copy_(last_hidden)


class CapturedStates:
    """The target's states in a captured search: a forward pass over the beams of each level.

    As `PathStates`. One search uses an object, from the empty prefixes on.
    """

    def __init__(self, inputs: TargetInputs, words: Tensor) -> None:
        """Args: words: [B, num_words] values of the requests, as `TargetInputs` describes."""
        self.inputs, self.trie = inputs, inputs.trie.trie
        columns, kv = sum(inputs.columns), inputs.kv
        sizes = [TREE, columns, words.shape[1] - TREE - columns]
        prefixes, self._slots, self._chain_slots = torch.split(words, sizes, dim=1)
        starts, lengths = prefixes[:, 0] * kv.width, prefixes[:, 1].contiguous()
        most = inputs.model.config.decoder.max_positions
        self._prefixes = Prefixes.on_device(kv.slots, starts, lengths, most)
        self._nodes: _Nodes | None = None

    def find_unscored(self, beams: Beams) -> None:
        """Returns None: all states are computed."""

    def of_beams(self, beams: Beams) -> Tensor:
        """As `PathStates`. The beams are those of the level below the last ones."""
        if not beams.level:
            return self.inputs.last_hidden
        new, rows = self._make_nodes(beams), self.inputs.rows
        nodes = new if self._nodes is None else self._nodes.and_also(new)
        self._nodes = nodes
        batch, order = self._lay_out(nodes, beams.nodes.shape[1])
        tokens = new.tokens.gather(1, order).flatten()
        hidden = self._forward(batch, tokens)
        # The states are in preorder; the caller needs the order of the beams.
        place = torch.empty_like(order).scatter_(1, order, _count(order))
        return hidden[(rows[:, None] * order.shape[1] + place).flatten()]

    def of_paths(self, owners: Tensor, nodes: Tensor) -> Tensor:
        """As `PathStates`: one forward pass over chains. Each request has as many paths."""
        size, requests = nodes.shape[1] - 1, self.inputs.rows.shape[0]
        offsets = self.inputs.model.config.level_offsets
        model, last_hidden = self.inputs.model, self.inputs.last_hidden
        logits, normalizers = level_scores(model, last_hidden, 0)
        level_logits = [(logits[owners], None if normalizers is None else normalizers[owners])]
        if size:
            above = enumerate(nodes[:, :-1].unbind(1))
            codes = [self._codes(own, level) + offsets[level] for level, own in above]
            tokens = torch.stack(codes, 1).flatten()
            index = torch.arange(tokens.shape[0], device=tokens.device)
            depths = index % size
            tree = TokenTree(
                tokens=tokens,
                parents=torch.where(depths > 0, index - 1, -1),
                depths=depths,
                ends=index - depths + size,
                offsets=torch.arange(requests + 1, device=tokens.device)
                * (tokens.shape[0] // requests),
            )
            slots = self._chain_slots.flatten()
            hidden = self._forward(
                TreeBatch(tree, None, slots, self._prefixes, fixed_shapes=True), tokens
            )
            states = hidden.view(nodes.shape[0], size, -1).unbind(1)
            level_logits += [level_scores(model, s, level) for level, s in enumerate(states, 1)]
        return path_log_probs(self.trie, nodes, level_logits)

    def _forward(self, batch: TreeBatch, tokens: Tensor) -> Tensor:
        """Returns hidden states [Tq, E]. The tokens [Tq] are codes, so item tables may move."""
        model, runner = self.inputs.model, self.inputs.runner
        return runner.compute(batch, model.tokens(tokens))

    def _codes(self, nodes: Tensor, level: int) -> Tensor:
        """Returns the codes of nodes of a level, in their shape. Those of leaves are clamped."""
        return self.trie.codes_of(nodes).long().clamp(max=self.trie.codebook_sizes[level] - 1)

    def _make_nodes(self, beams: Beams) -> _Nodes:
        """Returns the new nodes. Those of dead beams get leaf ranks after all others."""
        leaves, alive, level = self.trie.leaves(beams.nodes), beams.alive(), beams.level - 1
        alone = DEAD_LEAF + sum(self.inputs.columns[:level]) + _count(beams.nodes)
        return _Nodes(
            torch.where(alive, leaves.first, alone),
            torch.where(alive, leaves.last, alone + 1),
            torch.full_like(beams.nodes, level),
            self._codes(beams.nodes, level) + self.inputs.model.config.level_offsets[level],
        )

    def _lay_out(self, nodes: _Nodes, new: int) -> tuple[TreeBatch, Tensor]:
        """Lays out the trees in preorder. The last `new` columns are computed.

        Returns those columns [B, new] too, counted from 0, in preorder.
        """
        count, levels = nodes.first.shape[1], self.trie.num_levels
        # Preorder: by first leaf, then by depth, so that ancestors come before descendants.
        order = (nodes.first * levels + nodes.depths).argsort(1)
        place = torch.empty_like(order).scatter_(1, order, _count(order))
        start = (self.inputs.rows * count)[:, None]

        def pack(column: Tensor) -> Tensor:
            return column.gather(1, order).flatten()

        # A subtree ends at the first node whose first leaf is past the subtree's last leaf.
        first, last = nodes.first.gather(1, order), nodes.last.gather(1, order)
        tree = TokenTree(
            tokens=pack(nodes.tokens),
            parents=torch.full((order.numel(),), -1, device=order.device),  # attention reads `ends`
            depths=pack(nodes.depths),
            ends=(torch.searchsorted(first, last) + start).flatten(),
            offsets=torch.arange(start.shape[0] + 1, device=start.device) * count,
        )
        queries, column = place[:, -new:].sort(1)
        slots = pack(self._slots[:, :count])
        nodes_now = (queries + start).flatten()
        return TreeBatch(tree, nodes_now, slots, self._prefixes, fixed_shapes=True), column


@dataclass(frozen=True)
class _Nodes:
    """All nodes of B trees so far, each field [B, n].

    `first` is the first leaf under a node, `last` is one past the last leaf.
    """

    first: Tensor
    last: Tensor
    depths: Tensor
    tokens: Tensor

    def and_also(self, other: _Nodes) -> _Nodes:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Nodes(*(torch.cat(pair, dim=1) for pair in pairs))


def _count(like: Tensor) -> Tensor:
    """Returns [B, n] with 0, 1, 2, ... in every row."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)


def set_leaves(search: BeamSearch, leaves: SearchLeaves) -> None:
    """Moves a search at level 0 to the results of a replay.

    They are copied because the next replay overwrites them.
    """
    count, candidates = len(search.sequences), search.dense_candidates
    paths, log_probs = leaves.paths[:count].clone(), leaves.log_probs[:count].clone()
    if candidates is not None and leaves.dense_candidates is not None:
        scores = leaves.dense_candidates[:count, : candidates.rows.shape[1]]
        candidates.log_probs = torch.where(candidates.valid, scores, DEAD)
    search.add_nonfinite(leaves.nonfinite[:count].clone())
    search.beams = Beams(search.trie.num_levels, paths[..., -1], log_probs, paths)


class FixedFilter:
    """Buffers for the excluded leaves of requests. All searches of one form share them.

    Only one search runs at a time, so that sharing is safe.

    Attributes:
        largest: The filter of the largest number of requests.
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
            self.largest = BatchFilter(torch.full((requests, excluded), NOWHERE, device=device))
            return
        size = requests, trie.base.num_items // 32 + 1
        bits = count_leaves(torch.full(size, -1, dtype=torch.int32, device=device))
        added = torch.full((requests, trie.capacity), NOWHERE, device=device)
        self.largest = BatchFilter(bits=bits, added=added)

    def of(self, requests: int) -> BatchFilter:
        """Returns the filter of the first requests."""
        largest = self.largest
        if largest.excluded is not None:
            return BatchFilter(largest.excluded[:requests])
        assert largest.bits is not None and largest.added is not None
        words, counts = largest.bits.words[:requests], largest.bits.counts[:requests]
        return BatchFilter(bits=LeafBits(words, counts), added=largest.added[:requests])

    def load(self, version: Trie, requests: Seq[SlateQuery]) -> None:
        """Writes the filters of requests over this version. Rows after the last request have no
        effect.
        """
        if (bits := self.largest.bits) is not None:
            each = tuple(leaf_filter(version, r.excluded, r.allowed) for r in requests)
            filters, count = RequestFilters(version, each).in_bits(), len(requests)
            assert filters.bits is not None and self.largest.added is not None
            bits.words[:count].copy_(filters.bits.words)
            bits.counts[:count].copy_(filters.bits.counts)
            if not self._clean:
                self.largest.added.fill_(NOWHERE)
            if filters.added is not None:
                self.largest.added[:count, : filters.added.shape[1]].copy_(filters.added)
            self._clean = filters.added is None
            return
        assert self.largest.excluded is not None
        excluded = excluded_ranks(version, [r.excluded for r in requests], NOWHERE)
        if not self._clean:
            self.largest.excluded.fill_(NOWHERE)
        if excluded is not None:
            self.largest.excluded[: excluded.shape[0], : excluded.shape[1]].copy_(excluded)
        self._clean = excluded is None


# The outcome of a search. `replayed` used a graph. The others were launched, because of
# size: its requests, beams or prefixes; version: its catalogue version.
SearchResult = Literal["replayed", "size", "version"]
SEARCH_RESULTS: tuple[SearchResult, ...] = get_args(SearchResult)


@dataclass(frozen=True)
class SearchShape:
    """The largest search that one graph holds, or the smallest that holds some requests.

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

    @staticmethod
    def of(requests: Seq[SlateQuery]) -> SearchShape:
        """Returns the smallest shape that holds requests over one trie. It reads nothing from the
        device.
        """
        hidden = requests[0].trie.removed_leaves
        excluded: int | None = None
        if all(request.allowed is None for request in requests):
            excluded = max(0 if r.excluded is None else r.excluded.size for r in requests)
            excluded += 0 if hidden is None else hidden.shape[0]
        return SearchShape(
            len(requests),
            max(request.width for request in requests),
            excluded,
            any(request.dense_weight for request in requests),
        )

    def holds(self, other: SearchShape) -> bool:
        """Returns whether searches of the other shape fit into this one."""
        most, excluded = self.excluded, other.excluded
        return (
            other.requests <= self.requests
            and other.width <= self.width
            and (most is None or (excluded is not None and excluded <= most))
            and other.weighed == self.weighed
        )

    @property
    def name(self) -> str:
        """`8x64` for requests and beams; `8x64 weighed filtered` with dense candidates and a
        bitmap.
        """
        words = (self.weighed, " weighed"), (self.excluded is None, " filtered")
        return f"{self.requests}x{self.width}" + "".join(word for so, word in words if so)


BUCKETS = ((1, 64), (4, 64), (16, 64), (1, 256), (2, 256), (8, 256), (1, 512), (32, 64))
SHAPES = tuple(
    SearchShape(*bucket, excluded, weighed)
    for excluded, weighed, bucket in product((1024, None), (True, False), BUCKETS)
)


@dataclass(frozen=True)
class SearchLimits(CaptureLimits):
    """Which searches are captured.

    Attributes:
        shapes: In the order of capture.
        capacity: Most ids that a catalogue version may have added to its base.
    """

    shapes: tuple[SearchShape, ...] = SHAPES
    capacity: int = CAPACITY

    @property
    def most_requests(self) -> int:
        """Most requests of a captured search."""
        return max(shape.requests for shape in self.shapes)

    @property
    def most_beams(self) -> int:
        """Most beams of a captured search."""
        return max(shape.width for shape in self.shapes)


@dataclass(frozen=True)
class SearchBucket:
    """What one graph of a search is captured for.

    Attributes:
        strategy: Name of the strategy.
        shape: The largest search that fits.
    """

    strategy: str
    shape: SearchShape

    @property
    def name(self) -> str:
        """For example `beam 8x64`."""
        return f"{self.strategy} {self.shape.name}"


def buckets_of(weighs: bool, nezha: bool, shapes: Seq[SearchShape]) -> list[SearchBucket]:
    """Returns all buckets in the order of capture.

    Args:
        weighs: Whether the recommender has a dense head.
        nezha: Whether there is a head for the strategy `nezha`.
        shapes: In the order of capture.
    """
    strategies = ("beam", "nezha") if nezha else ("beam",)
    usable = [shape for shape in shapes if weighs or not shape.weighed]
    return [SearchBucket(strategy, shape) for shape, strategy in product(usable, strategies)]


# Filter buffers by the value of `SearchShape.excluded`.
Filters = dict[int | None, FixedFilter]


class BeamSearchGraphs(GraphSet[BeamSearchGraph]):
    """The captured searches of one recommender, over one base trie and its later versions."""

    limits: SearchLimits

    def __init__(
        self,
        runner: Runner,
        kv: KVCache,
        model: SemanticIdModel,
        head: SelfDraftHead | None,
        limits: SearchLimits,
        recorder: Recorder,
    ) -> None:
        """Captures nothing yet.

        Args:
            runner: The runner of the recommender.
            kv: The cache of the recommender.
            model: The recommender.
            head: The head of the strategy `nezha`, or None.
            limits: What is captured, and how much time and memory that may take.
            recorder: Captures the searches.
        """
        super().__init__(recorder, limits, SEARCH_RESULTS)
        self.runner, self.kv, self.model, self.head = runner, kv, model, head
        self._trie: FixedTrie | None = None
        self._capturing = threading.Lock()

    @torch.inference_mode()
    def capture_for(self, version: Trie, stepping: StepLock, go_on: Callable[[], bool]) -> None:
        """Captures searches for the base of a version and replaces the earlier graphs.

        Args:
            version: The catalogue's trie.
            stepping: The engine's lock, held during a capture. If graphs are in use, it stays free
                between two captures for as long as the last one took.
            go_on: Returns False when graphs are no longer wanted. Called before each capture.
        """
        base = version.base
        with self._capturing:
            buckets = buckets_of(
                self.model.config.dense_head, self.head is not None, self.limits.shapes
            )
            with stepping:
                if self._trie is not None and self._trie.base is base:
                    return
                trie = FixedTrie(base, self.limits.capacity)
                filters = _filters(trie, buckets)
            build = partial(self._build, trie, filters)
            graphs = self.capture(buckets, build, lock=stepping, go_on=go_on)
            if graphs is None:
                return
            graphs.sort(key=lambda graph: graph.shape.requests * graph.shape.width)
            with stepping:
                self._trie = trie
                self.use(graphs, buckets)

    def replay(self, strategy: str, sequences: Seq[SearchSequence]) -> BeamSearch | None:
        """Returns the finished search of requests over one version, or None if no graphs hold them.

        Requests that are more than a graph holds run in several replays of equal width. The
        requests change only at the end. After an error they can start again.
        """
        if self._trie is None:
            return None
        graphs = self._choose_graphs(strategy, sequences)
        if isinstance(graphs, str):
            self.counts[graphs] += 1
            return None
        search = BeamSearch.start(self.model, sequences, thresholds=False, filtered=False)
        add_candidates(search)
        start, parts = 0, list[SearchLeaves]()
        for graph in graphs:
            part = slice(start, start + graph.shape.requests)
            graph.load(search, part)
            leaves, loaded = graph.replay(), search.sequences[part]
            parts.append(leaves if len(graphs) == 1 else leaves.copy(len(loaded)))
            start += len(loaded)
        set_leaves(search, SearchLeaves.cat(parts))
        graphs[0].account(search.sequences)
        self.counts["replayed"] += 1
        return search

    def _choose_graphs(
        self, strategy: str, sequences: Seq[SearchSequence]
    ) -> list[BeamSearchGraph] | SearchResult:
        """Returns the graphs that hold the requests one after another, or the reason why there
        are none.

        The smallest graph is taken if it holds all of them. Otherwise graphs of the width that
        holds the most requests are taken, the last one as small as possible.
        """
        assert self._trie is not None
        requests = [request_of(sequence, SlateQuery) for sequence in sequences]
        if not self._trie.holds(requests[0].trie):
            return "version"
        if max(s.prefix_length for s in sequences) > self.model.config.decoder.max_positions:
            return "size"
        smallest, count = SearchShape.of(requests), len(requests)
        graphs = [graph for graph in self.captured if graph.bucket.strategy == strategy]
        large = [graph for graph in graphs if graph.shape.holds(smallest)]
        if large:
            return large[:1]
        one = replace(smallest, requests=1)
        shapes = [graph.shape for graph in graphs if graph.shape.holds(one)]
        if not shapes:
            return "size"
        most = max(shapes, key=lambda shape: (shape.requests, -shape.width))
        alike = [g for g in graphs if replace(g.shape, requests=most.requests) == most]
        replays = []
        for start in range(0, count, most.requests):
            size = min(count - start, most.requests)
            replays.append(next(g for g in alike if g.shape.requests >= size))
        return replays

    def _build(self, trie: FixedTrie, filters: Filters, bucket: SearchBucket) -> BeamSearchGraph:
        """Builds the search of a bucket."""
        shape = bucket.shape
        inputs: ScoreInputs
        if bucket.strategy == "nezha":
            assert self.head is not None
            inputs = HeadInputs(self.head, trie, shape.requests)
        else:
            inputs = TargetInputs(self.model, self.runner, self.kv, trie, shape)
        return BeamSearchGraph(inputs, trie, filters[shape.excluded], bucket)


def _filters(trie: FixedTrie, buckets: Seq[SearchBucket]) -> Filters:
    """Allocates the filter buffers of every form that the buckets use."""
    shapes = [bucket.shape for bucket in buckets]
    most = max((shape.requests for shape in shapes), default=0)
    return {form: FixedFilter(trie, most, form) for form in {s.excluded for s in shapes}}


def cuda_searches(
    runner: Runner,
    kv: KVCache,
    model: SemanticIdModel,
    head: SelfDraftHead | None,
    enabled: bool | None,
    limits: SearchLimits,
) -> BeamSearchGraphs | None:
    """Returns the searches of a recommender, to be captured on its CUDA device.

    Args:
        runner: The runner of the recommender.
        kv: The cache of the recommender.
        model: The recommender.
        head: The head of the strategy `nezha`, or None.
        enabled: False disables graphs. None and True enable them on a CUDA device.
        limits: What is captured, and how much time and memory that may take.

    Returns:
        None if graphs are disabled, the device is not CUDA, or the model is not autoregressive.
    """
    on_cuda = is_cuda(runner.pool.keys.device)
    if not on_cuda or enabled is False or not model.config.autoregressive:
        return None
    return BeamSearchGraphs(runner, kv, model, head, limits, CudaRecorder())
