"""The engine: it queues requests, steps them, and delivers their results.

A request waits in a bounded queue until its pages are free. It then shares each forward pass with
the other requests of its model. `build_engine` (build.py) assembles an engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast, overload

import torch

from recserve.core.client import LOCAL, Client
from recserve.core.errors import EngineStopped
from recserve.core.futures import ResultFuture, wait_all
from recserve.core.plugins import request_error
from recserve.core.request import PrefixKeys, Request, Result, SlateQuery
from recserve.core.sequence import Sequence
from recserve.core.strategy import Strategy
from recserve.engine.beam_search_graph import BeamSearchGraphs
from recserve.engine.engine_config import EngineConfig
from recserve.engine.request_checks import check_numbers
from recserve.engine.request_queue import Cancellations, RequestQueue, model_and_method
from recserve.engine.scheduler import Scheduler, StepLock
from recserve.engine.stats import EngineStats
from recserve.kernels.trie.trie import Trie
from recserve.models.scoring import Scoring
from recserve.search.strategies.beam import BeamStrategy
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.drafter import Drafter

log = logging.getLogger(__name__)
CLOSE_S = 60.0  # a step that runs longer than this while the engine closes counts as hanging
MOST_SCORINGS = 64  # strategies that are remembered, of scorings that requests have named


class StepTimer:
    """The time since the engine's last sign of progress. One thread notes it, any thread reads it.

    A step that hangs, for example in a kernel that never ends, makes `seconds` grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None

    def note_step(self) -> None:
        """Notes that a step begins, or that one has ended and the next one begins."""
        self._since_s = self._clock()

    def idle(self) -> None:
        """Notes that no step runs."""
        self._since_s = None

    @property
    def seconds(self) -> float:
        """Seconds since the current step began; 0 while no step runs."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s


class Engine:
    """Runs requests of a recommender, a ranker and a language model, or of a subset of them.

    Attributes:
        schedulers: One scheduler for each kind of request, by model name.
        drafters: Drafters of text requests, by name.
        selectable: Names that a SlateQuery may use.
        queue: Requests that wait for admission.
        stopped_by: The error that ended the engine's thread, or with which `close` left it in a
            step that hangs; None while it runs.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.schedulers: dict[str, Scheduler[Any, Any]] = {}
        self.drafters: dict[str, Drafter] = {}
        self.selectable: tuple[str, ...] = ()
        self._strategies: dict[str, Strategy] = {}
        self._scored: dict[Scoring, Strategy] = {}
        self.queue = RequestQueue(config.max_queue, config.queue_share, self.schedulers)
        self._changed = threading.Condition()
        self._stepping = StepLock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.stopped_by: BaseException | None = None
        self._cancelled = Cancellations()
        self._timer = StepTimer()

    @overload
    def submit(self, request: Request, client: Client = LOCAL) -> Future[Result]: ...

    @overload
    def submit(self, request: TextQuery, client: Client = LOCAL) -> Future[Completion]: ...

    def submit(
        self, request: Request | TextQuery, client: Client = LOCAL
    ) -> Future[Result] | Future[Completion]:
        """Queues a request and returns the future of its result. Raises as `submit_all`."""
        return self.submit_all([request], client)[0]

    def submit_all(
        self, requests: Seq[Request | TextQuery], client: Client = LOCAL
    ) -> list[Future[Any]]:
        """Queues requests of one client, all or none, and returns the futures of their results.

        Cancelling a future ends its request after the forward pass that includes it. Background
        requests run one by one, each while no other item request runs.

        Args:
            requests: The requests.
            client: Who sends them.

        Raises:
            QueueFull: If the queue of a model lacks room for its requests.
            TooManyQueries: If the queue would lack room with nothing else in it.
            RequestTooLarge: If a request needs more pages than the pool has.
            RuntimeError: If the engine is closed.
            EngineStopped: If the engine's thread has ended with an error.
            ValueError: If a model, strategy, drafter or verifier is not available, or a number is
                out of its range.
        """
        if not requests:
            return []
        sequences = []
        for request in requests:
            sequence = self._sequence_of(request, client)
            try:
                self.schedulers[sequence.model].check(sequence)
            except Exception:
                raise
            except BaseException as error:
                raise request_error(error) from error
            sequences.append(sequence)
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            if self.stopped_by is not None:
                raise EngineStopped("the engine has stopped")
            self.queue.enqueue(sequences)
            self._changed.notify()
        return [sequence.future for sequence in sequences]

    def check(self, request: Request | TextQuery) -> None:
        """Raises ValueError if a request cannot run, even alone. RequestTooLarge is one."""
        sequence = self._sequence_of(request, LOCAL)
        self.schedulers[sequence.model].check(sequence)

    def check_queue(
        self, models: Iterable[str], client: Client = LOCAL, num_ahead: int = 0
    ) -> None:
        """Raises QueueFull if the queue is full, before a caller prepares a request for it.

        Args:
            models: Models of which the request needs one.
            client: Who sends the request.
            num_ahead: Requests that are on their way to the queue before it.
        """
        self.queue.check(models, client, num_ahead)

    def add_strategy(self, name: str, strategy: Strategy) -> None:
        """Adds a strategy under a name, or replaces the strategy of that name."""
        self._strategies[name] = strategy

    @property
    def searches(self) -> BeamSearchGraphs | None:
        """Searches that are replayed as CUDA graphs. None replays none."""
        scheduler = self.schedulers.get("recommender")
        sets = {} if scheduler is None else scheduler.graph_sets
        return cast("BeamSearchGraphs | None", sets.get("searches"))

    def capture(self, trie: Trie) -> None:
        """Captures searches over a catalogue and its later changes, if this engine captures
        searches.

        The engine answers requests between two captures. The method is safe to call from any
        thread.
        """
        if (searches := self.searches) is not None:
            searches.capture_for(trie, self._stepping, lambda: not self._closing)

    def run(self, request: Request) -> Result:
        """Returns the result of one request. Steps the engine itself if `start` was not called."""
        return self.run_many([request])[0]

    def run_many(self, requests: list[Request]) -> list[Result]:
        """Returns results in order. The number of requests may exceed the queue's capacity."""
        results: list[Result] = []
        for start in range(0, len(requests), self.config.max_queue):
            part = self.submit_all(requests[start : start + self.config.max_queue])
            if self._thread is None:
                with torch.inference_mode():
                    while self._step():
                        pass
            results += wait_all(part)
        return results

    def forget(self, *prefixes: PrefixKeys) -> None:
        """Removes prefixes from every prefix cache, all of them between the same two steps."""
        if not prefixes:
            return
        caches = [scheduler.kv.prefixes for scheduler in self.schedulers.values()]
        stale = [(cache, cache.digests_of(prefix)) for cache in caches for prefix in prefixes]
        with self._stepping:
            for cache, digests in stale:
                cache.drop(digests)

    def forget_all(self) -> None:
        """Removes all prefixes from every prefix cache."""
        with self._stepping:
            for scheduler in self.schedulers.values():
                scheduler.kv.prefixes.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stops the engine between two steps. Requests submitted inside share the next step."""
        with self._stepping:
            yield

    def start(self) -> None:
        """Starts a thread that runs the steps."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Finishes queued and running requests, cancels queued background ones, and stops.

        A step that takes longer than CLOSE_S hangs, for example in a plug-in. Then all requests
        fail with EngineStopped, and the thread stays in its step. It does not keep the process from
        ending.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            began_s = time.monotonic()
            while self._thread.is_alive():
                self._thread.join(0.1)
                if min(self.stalled_s, time.monotonic() - began_s) > CLOSE_S:
                    self._leave_step()
                    break
            self._thread = None
        for entry in list(self.queue.background):
            entry.future.cancel()

    @property
    def stalled_s(self) -> float:
        """Seconds for which the running step has not ended; 0 while nothing runs."""
        return self._timer.seconds

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs. False before `start`, after `close` or a crash."""
        there = self._thread is not None and self._thread.is_alive()
        return there and self.stopped_by is None

    def token_capacity(self, model: str) -> int:
        """Returns how many tokens the key-value pool of a model holds.

        Args:
            model: `recommender`, `ranker` or `text`.
        """
        return self.schedulers[model].kv.allocator.num_pages * self.config.page_size

    def stats(self) -> EngineStats:
        """Returns the engine's statistics. It is safe to call from any thread.

        Figures of different components may be one step apart.
        """
        schedulers, begun = list(self.schedulers.values()), self.queue.num_background_begun
        sets = [item for scheduler in schedulers for item in scheduler.graph_sets.items()]
        counts: dict[str, Counter[str]] = {}
        for kind, graphs in sets:
            counts.setdefault(kind, Counter()).update(graphs.counts)
        captured = [graph for _, graphs in sets for graph in graphs.captured]
        # Caches that schedulers share count once.
        caches = list({id(scheduler.kv): scheduler.kv for scheduler in schedulers}.values())
        drafts = {name: own for one in schedulers for name, own in one.draft_health().items()}
        counted = [one.step_sizes for one in schedulers if one.step_sizes is not None]
        for name, strategy in list(self._strategies.items()):
            if strategy.policy is not None:
                own = strategy.policy.health()
                drafts |= {name if len(own) == 1 else f"{name} {of}": own[of] for of in own}
        return EngineStats(
            queue_depth=len(self.queue),
            running=sum(scheduler.num_running for scheduler in schedulers) - begun,
            pages_free=sum(kv.allocator.num_free for kv in caches),
            pages_cached=sum(kv.prefixes.num_pages for kv in caches),
            pages_total=sum(kv.allocator.num_pages for kv in caches),
            slots_total=sum(kv.allocator.num_pages * kv.pool.page_size for kv in caches),
            prefix_hit_tokens=sum(kv.prefixes.num_hit_tokens for kv in caches),
            prefix_missed_tokens=sum(kv.prefixes.num_missed_tokens for kv in caches),
            background=len(self.queue.background) + begun,
            graph_steps=counts.get("steps", {}),
            graph_drafts=counts.get("drafts", {}),
            graph_searches=counts.get("searches", {}),
            graph_prefills=counts.get("prefills", {}),
            graph_seconds={graph.bucket.name: graph.seconds for graph in captured},
            graph_bytes={graph.bucket.name: graph.bytes for graph in captured},
            unrecorded=[name for _, graphs in sets for name in graphs.missing],
            drafts=drafts,
            device=schedulers[0].runner.pool.keys.device.type,
            step_tokens=dict(counted[0]) if counted else None,
        )

    def step(self) -> bool:
        """Admits requests, runs one forward pass per model, and delivers the results.

        Returns:
            False if no request is queued or running after the step.

        Raises:
            DeviceLost: If the device of a model fails every call.
        """
        # Entering the mode costs more than this check. A caller that steps often enters it once.
        if torch.is_inference_mode_enabled():
            return self._step()
        with torch.inference_mode():
            return self._step()

    def _step(self) -> bool:
        with self._stepping:
            if self.queue:
                self.queue.admit(self.config.max_running)
            if self.queue.background and not (self._closing or self._runs_items()):
                self.queue.admit_background()
            cancelled = self._cancelled.take()
            for scheduler in self.schedulers.values():
                if scheduler.num_running:
                    scheduler.step(cancelled)
            for scheduler in self.schedulers.values():
                if scheduler.lost is not None:
                    raise scheduler.lost
            running = sum([scheduler.num_running for scheduler in self.schedulers.values()])
            queued = self.queue or (self.queue.background and not self._closing)
            return bool(queued) or running > 0

    def _runs_items(self) -> bool:
        """Returns whether an item request runs. A background request waits for its end.

        It does not wait for running texts, because a text takes seconds.
        """
        schedulers = self.schedulers.values()
        return any([one.num_running for one in schedulers if one.delays_background])

    def _loop(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            log.critical("the engine's thread has ended", exc_info=error)
            with self._changed:
                self.stopped_by = error
            self._abandon(EngineStopped("the engine has stopped"))
        finally:
            self._timer.idle()

    def _serve(self) -> None:
        """Steps until the engine is closed."""
        while True:
            with self._changed:
                while not (self.queue or self.queue.background or self._closing):
                    self._timer.idle()
                    self._changed.wait()
                if self._closing and not self.queue:
                    return
            self._timer.note_step()
            with torch.inference_mode():
                while self._step():
                    if self.stopped_by is not None:  # `close` has not waited for this step
                        return
                    self._timer.note_step()

    def _leave_step(self) -> None:
        """Fails all requests while a step hangs, without a call of what may hang."""
        self.stopped_by = error = EngineStopped("the engine was closed while a step hung")
        log.critical("a step of the engine hangs; it did not end within %g s", CLOSE_S)
        self.queue.drain(error)
        for scheduler in self.schedulers.values():
            scheduler.fail_all(error)

    def _abandon(self, error: EngineStopped) -> None:
        """Fails all requests, of which none can get a result any more."""
        self.queue.drain(error)
        for scheduler in self.schedulers.values():
            scheduler.abandon(error)

    def _sequence_of(self, request: Request | TextQuery, client: Client) -> Sequence:
        """Returns the request with its strategy or drafter."""
        model, name = model_and_method(request)
        if model not in self.schedulers:
            raise ValueError(f"this engine has no {model}; it serves {sorted(self.schedulers)}")
        check_numbers(request)
        methods: Mapping[str, Drafter | Strategy] = self._strategies
        if isinstance(request, TextQuery):
            methods = self.drafters
            if name not in methods:
                raise ValueError(f"drafter is {name!r}; choose one of {sorted(self.drafters)}")
        elif name not in methods:
            raise ValueError(f"strategy is {name!r}; choose one of {self.selectable}")
        method = methods[name]
        if isinstance(request, SlateQuery) and request.scoring is not None:
            method = self._with_scoring(request.scoring)
        future = self._cancelled.track(ResultFuture[Any]())
        sequence: Sequence = self.schedulers[model].sequence_of(
            request, future, method, model, client
        )
        return sequence

    def _with_scoring(self, scoring: Scoring) -> Strategy:
        """Returns beam search with a scoring. Requests with the same one step together."""
        found = self._scored.get(scoring)
        if found is None:
            beam = self._strategies["beam"]
            if not isinstance(beam, BeamStrategy):
                raise ValueError("scoring: the strategy 'beam' of this engine has none to choose")
            if len(self._scored) >= MOST_SCORINGS:
                self._scored.pop(next(iter(self._scored)), None)
            found = self._scored.setdefault(scoring, beam.with_scoring(scoring))
        return found
