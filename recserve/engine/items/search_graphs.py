"""Searches captured as CUDA graphs for a catalogue, one for each bucket of requests and beams.

A search that fits no bucket launches its kernels one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal, get_args

import torch

from recserve.core.sequence import SearchSequence
from recserve.core.strategy import Strategy
from recserve.engine.items.graph_search import (
    BeamSearchGraph,
    FixedFilter,
    SearchLeaves,
    SearchShape,
    SearchSize,
    columns_of,
    set_leaves,
)
from recserve.engine.items.search_scorers import HeadScorer, LevelScorer, TargetScorer
from recserve.engine.runtime.cuda_graphs import (
    CapturedGraph,
    CaptureLimits,
    CapturePace,
    CudaRecorder,
    GraphCapture,
    is_cuda,
    missing_names,
)
from recserve.engine.runtime.runner import Runner
from recserve.engine.runtime.scheduler import StepLock
from recserve.kernels.trie.fixed_trie import CAPACITY, FixedTrie
from recserve.kernels.trie.trie import Trie
from recserve.models.item_heads import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.search.beam_search import BeamSearch
from recserve.search.dense_candidates import add_candidates
from recserve.search.strategies.beam import request_of
from recserve.search.strategy import RecommendStrategy

# The outcome of a search. `replayed` used a graph. The others were launched, because of
# size: its requests, beams or roots; version: its catalogue version.
SearchResult = Literal["replayed", "size", "version"]
SEARCH_RESULTS: tuple[SearchResult, ...] = get_args(SearchResult)
# Filter buffers by the value of `SearchShape.excluded`.
Filters = dict[int | None, FixedFilter]
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


CapturedSearch = CapturedGraph[SearchBucket, BeamSearchGraph, SearchLeaves]


def buckets_of(weighs: bool, nezha: bool, shapes: Seq[SearchShape]) -> list[SearchBucket]:
    """Returns all buckets in the order of capture.

    Args:
        weighs: Whether the recommender has a dense head.
        nezha: Whether there is a head for the strategy `nezha`.
        shapes: In the order of capture.
    """
    strategies = ("beam", "nezha") if nezha else ("beam",)
    kept = [shape for shape in shapes if weighs or not shape.weighed]
    return [SearchBucket(strategy, shape) for shape, strategy in product(kept, strategies)]


class BeamSearchGraphs:
    """The captured searches of one recommender, over one base trie and its later versions.

    Attributes:
        counts: Number of searches by outcome, as in SEARCH_RESULTS.
        captured: The graphs, from small to large.
        missing: Names of buckets without a graph. The log says why.
    """

    def __init__(
        self,
        runner: Runner,
        model: Recommender,
        head: SelfDraftHead | None,
        limits: SearchLimits,
        record: Callable[[Callable[[], SearchLeaves]], Callable[[], SearchLeaves]],
        taken: Callable[[], int] = lambda: 0,
    ) -> None:
        """Captures nothing yet.

        Args:
            runner: The runner of the recommender.
            model: The recommender.
            head: The head of the strategy `nezha`, or None.
            limits: What is captured, and how much time and memory that may take.
            record: Captures a search and returns its replay.
            taken: Returns the bytes that captures have taken so far.
        """
        self.runner, self.model, self.head, self.limits = runner, model, head, limits
        self.counts: dict[SearchResult, int] = dict.fromkeys(SEARCH_RESULTS, 0)
        self.captured: list[CapturedSearch] = []
        self.missing: list[str] = []
        self._record, self._taken = record, taken
        self._trie: FixedTrie | None = None
        self._recording = threading.Lock()

    @torch.inference_mode()
    def record(self, version: Trie, stepping: StepLock, go_on: Callable[[], bool]) -> None:
        """Captures searches for the base of a version and replaces the earlier graphs.

        Args:
            version: The catalogue's trie.
            stepping: The engine's lock, held during a capture. If graphs are in use, it stays free
                between two captures for as long as the last one took.
            go_on: Returns False when graphs are no longer wanted. Called before each capture.
        """
        base = version.base
        with self._recording:
            buckets = buckets_of(
                self.model.config.dense_head, self.head is not None, self.limits.shapes
            )
            with stepping:
                if self._trie is not None and self._trie.base is base:
                    return
                trie = FixedTrie(base, self.limits.capacity)
                filters = _filters(trie, buckets)
            capture = GraphCapture[SearchBucket, BeamSearchGraph, SearchLeaves](
                partial(self._built, trie, filters), self._record, self._taken, self.limits
            )
            made = capture(buckets, CapturePace(stepping, go_on, pause=bool(self.captured)))
            if made is None:
                return
            missing = missing_names(buckets, made)
            made.sort(key=lambda graph: graph.bucket.shape.requests * graph.bucket.shape.width)
            with stepping:
                self._trie, self.captured, self.missing = trie, made, missing

    def serve(self, strategies: Mapping[str, Strategy]) -> None:
        """Connects the strategies to the graphs captured for them."""
        for strategy in strategies.values():
            if isinstance(strategy, RecommendStrategy) and strategy.replays is not None:
                strategy.recorded = partial(self.search, strategy.replays)

    def search(self, strategy: str, sequences: Seq[SearchSequence]) -> BeamSearch | None:
        """Returns the finished search of requests over one version, or None if no graph holds
        them.

        Requests that are more than a graph holds run in several replays of equal width.
        """
        if self._trie is None:
            return None
        found = self._fitting(strategy, sequences)
        if isinstance(found, str):
            self.counts[found] += 1
            return None
        self.counts["replayed"] += 1
        search = BeamSearch.start(self.model, sequences, bounded=False, filtered=False)
        add_candidates(search)
        start, parts = 0, list[SearchLeaves]()
        for graph in found:
            part = slice(start, start + graph.bucket.shape.requests)
            graph.function.load(search, part)
            leaves, loaded = graph.replay(), search.sequences[part]
            parts.append(leaves if len(found) == 1 else leaves.copy(len(loaded)))
            graph.function.account(loaded)
            start += len(loaded)
        set_leaves(search, SearchLeaves.cat(parts))
        return search

    def _fitting(
        self, strategy: str, sequences: Seq[SearchSequence]
    ) -> list[CapturedSearch] | SearchResult:
        """Returns the graphs that hold the requests one after another, or the reason why there
        are none.

        The smallest graph is taken if it holds all of them. Otherwise graphs of the width that
        holds the most requests are taken, the last one as small as possible.
        """
        assert self._trie is not None
        requests = [request_of(sequence) for sequence in sequences]
        if not self._trie.holds(requests[0].trie):
            return "version"
        if max(s.root_length for s in sequences) > self.model.config.decoder.max_positions:
            return "size"
        size, count = SearchSize.of(requests), len(requests)
        graphs = [graph for graph in self.captured if graph.bucket.strategy == strategy]
        holding = [graph for graph in graphs if graph.bucket.shape.holds(size)]
        if holding:
            return holding[:1]
        one = replace(size, requests=1)
        fitting = [graph.bucket.shape for graph in graphs if graph.bucket.shape.holds(one)]
        if not fitting:
            return "size"
        most = max(fitting, key=lambda shape: (shape.requests, -shape.width))
        alike = [g for g in graphs if replace(g.bucket.shape, requests=most.requests) == most]
        found = []
        for start in range(0, count, most.requests):
            left = min(count - start, most.requests)
            found.append(next(g for g in alike if g.bucket.shape.requests >= left))
        return found

    def _built(self, trie: FixedTrie, filters: Filters, bucket: SearchBucket) -> BeamSearchGraph:
        """Builds the search of a bucket."""
        shape = bucket.shape
        scorer: LevelScorer
        if bucket.strategy == "nezha":
            assert self.head is not None
            scorer = HeadScorer(self.head, shape.requests)
        else:
            columns, dense_candidates = (
                columns_of(trie.widths, shape.width),
                shape.width * shape.weighed,
            )
            scorer = TargetScorer(
                self.model, self.runner, trie, columns, shape.requests, dense_candidates
            )
        return BeamSearchGraph(scorer, trie, filters[shape.excluded], shape)


def _filters(trie: FixedTrie, buckets: Seq[SearchBucket]) -> Filters:
    """Allocates the filter buffers of every form that the buckets use."""
    shapes = [bucket.shape for bucket in buckets]
    most = max((shape.requests for shape in shapes), default=0)
    return {form: FixedFilter(trie, most, form) for form in {s.excluded for s in shapes}}


def cuda_searches(
    runner: Runner,
    model: Recommender,
    head: SelfDraftHead | None,
    wanted: bool | None,
    limits: SearchLimits,
) -> BeamSearchGraphs | None:
    """Returns the searches of a recommender, to be captured on its CUDA device.

    Args:
        runner: The runner of the recommender.
        model: The recommender.
        head: The head of the strategy `nezha`, or None.
        wanted: False disables graphs. None and True enable them on a CUDA device.
        limits: What is captured, and how much time and memory that may take.

    Returns:
        None if graphs are disabled, the device is not CUDA, or the model is not autoregressive.
    """
    on_cuda = is_cuda(runner.pool.keys.device)
    if not on_cuda or wanted is False or not model.config.autoregressive:
        return None
    recorder = CudaRecorder()
    return BeamSearchGraphs(runner, model, head, limits, recorder, lambda: recorder.bytes)
