"""Searches recorded for a catalogue, one for each bucket of requests and beams, and replayed.

On CUDA a record is a CUDA graph. What fits none is launched as it comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, get_args

import torch

from recserve.core.sequence import Sequence
from recserve.core.strategy import Strategy
from recserve.engine.items.fixed_search import (
    Asked,
    FixedFilter,
    FixedSearch,
    Leaves,
    SearchShape,
    columns_of,
    with_leaves,
)
from recserve.engine.items.search_scorers import HeadScorer, Scorer, TargetScorer
from recserve.engine.runtime.cuda_recorder import CudaRecorder
from recserve.engine.runtime.runner import Runner
from recserve.engine.runtime.scheduler import StepLock
from recserve.kernels.trie.fixed_trie import ROOM, FixedTrie
from recserve.kernels.trie.trie_view import TrieView
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.search import rerank
from recserve.search.beams import Beams
from recserve.search.recommend_strategy import RecommendStrategy
from recserve.search.strategies.beam import request_of
from recserve.search.verify import begin

log = logging.getLogger(__name__)

# What became of a search: replayed, or launched because of its requests, beams and roots, or of the
# catalogue version it is over.
SearchResult = Literal["replayed", "size", "version"]
SEARCH_RESULTS: tuple[SearchResult, ...] = get_args(SearchResult)
# By what `excluded` of a shape says.
Filters = dict[int | None, FixedFilter]
BUCKETS = ((1, 64), (4, 64), (16, 64), (1, 256), (2, 256), (8, 256), (1, 512))
SHAPES = tuple(
    SearchShape(*bucket, excluded, weighed)
    for excluded, weighed, bucket in product((1024, None), (True, False), BUCKETS)
)


@dataclass(frozen=True)
class SearchLimits:
    """shapes: what is recorded, in this order. room: ids that a version may have inserted. seconds,
    bytes: no record is begun after so long, or with so much memory taken.
    """

    shapes: tuple[SearchShape, ...] = SHAPES
    room: int = ROOM
    seconds: float = 60.0
    bytes: int = 2 * 2**30


@dataclass(frozen=True)
class Bucket:
    """What one record is for."""

    strategy: str
    shape: SearchShape

    @property
    def name(self) -> str:
        """As `beam 8x64`."""
        return f"{self.strategy} {self.shape.name}"


@dataclass(frozen=True)
class RecordedSearch:
    """One record and what it took: seconds and bytes."""

    bucket: Bucket
    seconds: float
    bytes: int
    search: FixedSearch
    replay: Callable[[], Leaves]


def buckets_of(weighs: bool, nezha: bool, shapes: Seq[SearchShape]) -> list[Bucket]:
    """In the order in which they are recorded. weighs: whether the recommender has a dense head.
    nezha: whether there is a head of `nezha`.
    """
    strategies = ("beam", "nezha") if nezha else ("beam",)
    kept = [shape for shape in shapes if weighs or not shape.weighed]
    return [Bucket(strategy, shape) for shape, strategy in product(kept, strategies)]


class SearchGraphs:
    """The recorded searches of one recommender, over one base trie and what came after it.

    counts: searches by what became of them, SEARCH_RESULTS. recorded: in the order in which they
    are tried. unrecorded: names of what was to be recorded and is not: the log says why.
    """

    def __init__(
        self,
        runner: Runner,
        model: Recommender,
        head: SelfDraftHead | None,
        limits: SearchLimits,
        record: Callable[[Callable[[], Leaves]], Callable[[], Leaves]],
        taken: Callable[[], int] = lambda: 0,
    ) -> None:
        """head: of `nezha`, None: there is none. taken: bytes that records have taken so far."""
        self.runner, self.model, self.head, self.limits = runner, model, head, limits
        self.counts: dict[SearchResult, int] = dict.fromkeys(SEARCH_RESULTS, 0)
        self.recorded: list[RecordedSearch] = []
        self.unrecorded: list[str] = []
        self._record, self._taken = record, taken
        self._trie: FixedTrie | None = None
        self._recording = threading.Lock()

    @torch.inference_mode()
    def record(self, version: TrieView, stepping: StepLock, go_on: Callable[[], bool]) -> None:
        """Record for the base of a version; these replace the records that there were.

        stepping: held while one is made; between two it is free for as long as the last one took.
        go_on: whether they are still wanted.
        """
        base = version.base
        with self._recording:
            made, weighs = list[RecordedSearch](), self.model.config.dense_head
            buckets = buckets_of(weighs, self.head is not None, self.limits.shapes)
            with stepping:
                if self._trie is not None and self._trie.base is base:
                    return
                trie = FixedTrie(base, self.limits.room)
                filters = _filters(trie, buckets)
            began, before, left = time.monotonic(), self._taken(), list[str]()
            for bucket in buckets:
                late = time.monotonic() - began > self.limits.seconds
                if late or self._taken() - before > self.limits.bytes:
                    left.append(bucket.name)
                    continue
                if not go_on():
                    return
                try:
                    with stepping:
                        made.append(self._recorded(trie, filters, bucket))
                except Exception:  # Triton's errors have no other base
                    log.exception("no record of %s: such searches are launched", bucket.name)
                    break
                log.info("recorded search %s: %.2f s", bucket.name, made[-1].seconds)
                if self.recorded:
                    time.sleep(made[-1].seconds)
            if left:
                log.warning("no time or memory is left to record the searches %s", ", ".join(left))
            made.sort(key=lambda one: one.bucket.shape.requests * one.bucket.shape.width)
            names = {one.bucket.name for one in made}
            with stepping:
                self._trie, self.recorded = trie, made
                self.unrecorded = [b.name for b in buckets if b.name not in names]

    def serve(self, strategies: Mapping[str, Strategy]) -> None:
        """Let the strategies of these names replay what is recorded for them."""
        for strategy in strategies.values():
            if isinstance(strategy, RecommendStrategy) and strategy.replays is not None:
                strategy.recorded = partial(self.search, strategy.replays)

    def search(self, strategy: str, sequences: Seq[Sequence]) -> Beams | None:
        """Finished beams of requests over one version; None where no record holds them."""
        if self._trie is None:
            return None
        found = self._smallest(strategy, sequences)
        if isinstance(found, str):
            self.counts[found] += 1
            return None
        self.counts["replayed"] += 1
        beams = begin(tuple(sequences), by_children=False, filtered=False)
        beams = rerank.with_rivals(beams, self.model)
        found.search.load(beams)
        beams = with_leaves(beams, found.replay())
        found.search.account(sequences)
        return beams

    def _smallest(self, strategy: str, sequences: Seq[Sequence]) -> RecordedSearch | SearchResult:
        """The smallest record that holds them, or why there is none."""
        assert self._trie is not None
        requests = [request_of(sequence) for sequence in sequences]
        if not self._trie.holds(requests[0].trie):
            return "version"
        asked = Asked.of(requests)
        if max(s.root_length for s in sequences) <= self.model.config.decoder.max_positions:
            for made in self.recorded:
                if made.bucket.strategy == strategy and made.bucket.shape.holds(asked):
                    return made
        return "size"

    def _recorded(self, trie: FixedTrie, filters: Filters, bucket: Bucket) -> RecordedSearch:
        began, before, shape = time.monotonic(), self._taken(), bucket.shape
        scorer: Scorer
        if bucket.strategy == "nezha":
            assert self.head is not None
            scorer = HeadScorer(self.head, shape.requests)
        else:
            columns, rivals = columns_of(trie.widths, shape.width), shape.width * shape.weighed
            scorer = TargetScorer(self.model, self.runner, trie, columns, shape.requests, rivals)
        search = FixedSearch(scorer, trie, filters[shape.excluded], shape)
        replay = self._record(search)
        seconds, size = time.monotonic() - began, self._taken() - before
        return RecordedSearch(bucket, seconds, size, search, replay)


def _filters(trie: FixedTrie, buckets: Seq[Bucket]) -> Filters:
    """Of every form that buckets ask for."""
    shapes = [bucket.shape for bucket in buckets]
    most = max((shape.requests for shape in shapes), default=0)
    return {form: FixedFilter(trie, most, form) for form in {s.excluded for s in shapes}}


def cuda_searches(
    runner: Runner,
    model: Recommender,
    head: SelfDraftHead | None,
    wanted: bool | None,
    limits: SearchLimits,
) -> SearchGraphs | None:
    """wanted: None: where the model is on a CUDA device."""
    on_cuda = runner.pool.keys.device.type == "cuda" and torch.cuda.is_available()
    if not on_cuda or wanted is False or not model.config.autoregressive:
        return None
    recorder = CudaRecorder()
    return SearchGraphs(runner, model, head, limits, recorder, lambda: recorder.bytes)
