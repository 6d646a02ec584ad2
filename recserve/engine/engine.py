"""The engine: requests in, answers out, one step at a time.

A request waits in a bounded queue, is admitted when its pages can be had, shares each forward with
whatever else runs on its model, and leaves with its future set.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, overload

import torch

from recserve.core.drafting import Strategy
from recserve.core.request import RecommendRequest, Request, Result, RootKeys
from recserve.engine.engine_config import EngineConfig as EngineConfig
from recserve.engine.items.lane import Lane
from recserve.engine.items.search_graphs import SearchGraphs, cuda_searches
from recserve.engine.runtime.delivery import AnyLane, Cancellations, deliver, fail
from recserve.engine.runtime.destination import destination, in_background
from recserve.engine.runtime.invariance import STRATEGIES, invariant_runner
from recserve.engine.runtime.networks import DecoderTrunk, RankerTrunk
from recserve.engine.runtime.runner import Runner
from recserve.engine.runtime.step_lock import StepLock
from recserve.engine.runtime.waiting import Waiting, admit, line_up
from recserve.engine.stats import EngineStats, stats_of
from recserve.engine.text.graphs import cuda_graphs
from recserve.engine.text.text_lane import TextLane, TextLimits
from recserve.kernels.fp8 import pool_dtype
from recserve.kernels.paged_kv import KVPool
from recserve.kernels.trie.trie_overlay import AnyTrie
from recserve.models.language_model import LanguageModel
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender
from recserve.search.heads import Heads
from recserve.search.strategies import (
    RankStrategy,
    SpeculativeStrategy,
    TextScoreStrategy,
    WarmDraftStrategy,
    WarmStrategy,
    likelihood_strategy,
    recommend_strategies,
)
from recserve.speculation.drafters.none import NoDrafter
from recserve.speculation.text import Drafter
from recserve.speculation.text_request import Completion, TextRequest

log = logging.getLogger(__name__)


class Engine:
    """Serves a recommender, a ranker, a language model, or any of them together."""

    def __init__(
        self,
        recommender: Recommender | None = None,
        ranker: Ranker | None = None,
        config: EngineConfig | None = None,
        heads: Heads | None = None,
        text: LanguageModel | None = None,
        drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        """heads: what the strategies other than `beam` need; None: there are no others.
        drafters: of the language model, by name; `none` is always there.
        Raises NotInvariant where the config asks for what this machine cannot keep.
        """
        self.config = config or EngineConfig()
        self._lanes: dict[str, AnyLane] = {}
        self.drafters: dict[str, Drafter] = {"none": NoDrafter(), **(drafters or {})}
        self._strategies: dict[str, Strategy] = {}
        self.strategies: tuple[str, ...] = ()
        self.searches: SearchGraphs | None = None
        if recommender is not None:
            runner, heads = self._runner(DecoderTrunk(recommender.eval())), heads or Heads()
            self._lanes["recommender"] = Lane(runner)
            self._strategies = recommend_strategies(recommender, heads)
            if not self.config.invariant:
                wanted, what = self.config.graphs, self.config.search_limits
                self.replay(cuda_searches(runner, recommender, heads.nezha, wanted, what))
            if self.config.invariant:
                kept = self._strategies.items()
                self._strategies = {name: how for name, how in kept if name in STRATEGIES}
            self.strategies = tuple(sorted(self._strategies))
            if "speculative" in self._strategies:
                self._strategies["warm_draft"] = WarmDraftStrategy(recommender)
            self._strategies["likelihood"] = likelihood_strategy(recommender)
        if ranker is not None:
            self._lanes["ranker"] = Lane(self._runner(RankerTrunk(ranker.eval())))
            self._strategies["ranker"] = RankStrategy(ranker)
        self._strategies["warm"] = WarmStrategy()
        if text is not None:
            runner = self._runner(DecoderTrunk(text.eval()))
            c = self.config
            graphs = cuda_graphs(
                runner, text, c.max_running, c.graphs, c.graph_limits, self.drafters
            )
            limits = TextLimits(load_aware=c.load_aware)
            self._lanes["text"] = TextLane(runner, text, limits, graphs)
            self._lanes["text_scores"] = Lane(runner, beside=self._lanes["text"])
            self._strategies["text_scores"] = TextScoreStrategy(text)
        # Lanes of requests that nobody waits for, over the same pages, and the queue before them.
        self._background = {
            name: Lane(lane.runner, beside=lane)
            for name, lane in self._lanes.items()
            if name in ("recommender", "ranker") and isinstance(lane, Lane)
        }
        self._waiting: deque[Waiting] = deque()
        self._behind: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._stepping = StepLock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._cancelled = Cancellations()
        self._seconds_per_request = 0.01

    @overload
    def submit(self, request: Request) -> Future[Result]: ...

    @overload
    def submit(self, request: TextRequest) -> Future[Completion]: ...

    def submit(self, request: Request | TextRequest) -> Future[Any]:
        """Queue a request; its future gets the answer or the error. Those that nobody waits for
        have a queue of their own, and their turn when nothing else is asked of items.

        Raises QueueFull, RequestTooLarge, or ValueError for a model, strategy, drafter or verifier
        that is not here.
        """
        lane, how = self._route(request)
        lane.check(request, how)
        future = self._cancelled.future()
        waiting = Waiting(request, future, time.monotonic(), lane, how)
        queue = self._behind if in_background(request) else self._waiting
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            line_up(queue, waiting, self.config.max_queue, self._seconds_per_request)
            self._changed.notify()
        return future

    def offer(self, name: str, strategy: Strategy) -> None:
        """Decode the recommender's requests for this name so, from now on."""
        self._strategies[name] = strategy

    def replay(self, searches: SearchGraphs | None) -> None:
        """Answer from recorded searches wherever one holds the requests, from now on."""
        self.searches = searches
        if searches is not None:
            searches.serve(self._strategies)

    def record(self, trie: AnyTrie) -> None:
        """Record searches over this catalogue and what comes after it, where they are recorded at
        all; requests are answered in between. Safe from any thread.
        """
        if self.searches is not None:
            self.searches.record(trie, self._stepping, lambda: not self._closing)

    def prepare(self, trie: AnyTrie) -> None:
        """Deprecated name of `record`: nothing is measured before requests any more."""
        warnings.warn("Engine.prepare is Engine.record now", DeprecationWarning, stacklevel=2)
        self.record(trie)

    def repeats(self, request: RecommendRequest) -> bool:
        """Whether the request would be answered from a draft that was kept, if there were one."""
        strategy = self._strategies.get(request.strategy)
        return isinstance(strategy, SpeculativeStrategy) and strategy.repeats(request)

    def run(self, request: Request) -> Result:
        """Answer one request; steps the engine itself when its thread is not running."""
        return self.run_many([request])[0]

    def run_many(self, requests: list[Request]) -> list[Result]:
        """Answers in order; more requests than the queue holds are fed as there is room."""
        futures: list[Future[Result]] = []
        for start in range(0, len(requests), self.config.max_queue):
            part = [self.submit(r) for r in requests[start : start + self.config.max_queue]]
            if self._thread is None:
                with torch.inference_mode():
                    while self._step():
                        pass
            futures += part
            for future in part:
                future.exception()
        return [future.result() for future in futures]

    def cancel(self, future: Future[Any]) -> None:
        """Its answer is not wanted any more: work not yet begun is not begun."""
        future.cancel()

    def forget(self, *roots: RootKeys) -> None:
        """Drop roots from every prefix cache, all between the same two steps."""
        if not roots:
            return
        caches = [lane.cache for lane in self._lanes.values()]
        gone = [(cache, cache.digests_of(root)) for cache in caches for root in roots]
        with self._stepping:
            for cache, digests in gone:
                cache.drop(digests)

    def forget_all(self) -> None:
        """Drop every cached root."""
        with self._stepping:
            for lane in self._lanes.values():
                lane.cache.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the engine between two steps: what is submitted inside shares the next step."""
        with self._stepping:
            yield

    def start(self) -> None:
        """Run the steps on a thread of their own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Finish what is waiting and running, but for what nobody waits for, then stop the
        thread.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for waiting in self._behind:
            waiting.future.cancel()

    @property
    def alive(self) -> bool:
        """Whether its thread runs; False before `start`, after `close` and if it died."""
        return self._thread is not None and self._thread.is_alive()

    def room(self, model: str) -> int:
        """Tokens that the pool of a model holds: `recommender`, `ranker` or `text`."""
        return self._lanes[model].allocator.num_pages * self.config.page_size

    def stats(self) -> EngineStats:
        """Safe to call from any thread; the figures may be one step apart."""
        text = self._lanes.get("text")
        graphs = text.graphs if isinstance(text, TextLane) else None
        behind = len(self._behind) + sum(lane.num_running for lane in self._background.values())
        lanes = list(self._lanes.values())
        return stats_of(len(self._waiting), lanes, graphs, self.searches, behind)

    def step(self) -> bool:
        """Admit, one forward per model, deliver. False when nothing is left to do."""
        # To enter the mode costs more than to ask for it: who steps often enters it once.
        if torch.is_inference_mode_enabled():
            return self._step()
        with torch.inference_mode():
            return self._step()

    def _step(self) -> bool:
        with self._stepping:
            began = time.monotonic()
            if self._waiting:
                admit(self._waiting, self.config.max_running)
            answered, cancelled = 0, self._cancelled.any()
            for lane in self._lanes.values():
                if lane.num_running:
                    if cancelled:
                        lane.drop_ended()
                    answered += self._step_lane(lane)
            if answered:
                spent = (time.monotonic() - began) / answered
                self._seconds_per_request += 0.1 * (spent - self._seconds_per_request)
            self._step_background()
            lanes = [*self._lanes.values(), *self._background.values()]
            waiting = self._waiting or (self._behind and not self._closing)
            return bool(waiting) or sum([lane.num_running for lane in lanes]) > 0

    def _step_lane(self, lane: AnyLane) -> int:
        """One forward of a model; a failure ends its running requests with that error, no
        others.
        """
        done = lane.begin()
        for sequence, result in done:
            deliver(sequence, result)
        try:
            stepped = lane.step()
        except Exception as error:
            log.exception("a step failed")
            for sequence in lane.drop_all():
                fail(sequence.future, error)
            return len(done)
        for sequence, result in stepped:
            deliver(sequence, result)
        return len(done) + len(stepped)

    def _step_background(self) -> None:
        """One step of one request that nobody waits for, while no item lane has another to answer:
        a request that comes meanwhile waits for no more than that. A text, which goes on for
        seconds, does not hold it up.
        """
        if not (self._behind or any([lane.num_running for lane in self._background.values()])):
            return
        if any(lane.num_running for lane in self._lanes.values() if isinstance(lane, Lane)):
            return
        if self._behind and not self._closing:
            admit(self._behind, 1)
        for lane in self._background.values():
            if lane.num_running:
                lane.drop_ended()
                self._step_lane(lane)
                return

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._behind or self._closing):
                    self._changed.wait()
                if self._closing and not self._waiting:
                    return
            with torch.inference_mode():
                while self._step():
                    pass

    def _route(self, request: Request | TextRequest) -> tuple[AnyLane, Strategy | Drafter]:
        model, name = destination(request)
        if model not in self._lanes:
            raise ValueError(f"this engine has no {model}; it serves {sorted(self._lanes)}")
        if isinstance(request, TextRequest):
            if name not in self.drafters:
                raise ValueError(f"drafter is {name!r}; choose one of {sorted(self.drafters)}")
            return self._lanes[model], self.drafters[name]
        if name not in self._strategies:
            raise ValueError(f"strategy is {name!r}; choose one of {self.strategies}")
        lanes = self._background if in_background(request) else self._lanes
        return lanes[model], self._strategies[name]

    def _runner(self, trunk: DecoderTrunk | RankerTrunk) -> Runner:
        size, dtype = self.config.page_size, pool_dtype(self.config.kv_dtype, trunk.dtype)
        num_pages = max(self.config.kv_bytes // (trunk.kv_shape.slot_bytes(dtype) * size), 1)
        if self.config.invariant:
            return invariant_runner(trunk, num_pages, size, dtype)
        return Runner(trunk, KVPool(trunk.kv_shape, num_pages, size, dtype, trunk.device))
