"""The step of every scheduler, the isolation of faults, and the delivery of results."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from recserve.core.client import Client
from recserve.core.draft_policy import DraftHealth
from recserve.core.errors import DeadlineExceeded, EngineStopped
from recserve.core.finite import NotFinite
from recserve.core.plugins import request_error
from recserve.core.request import PromptQuery, Request, TextScoreQuery
from recserve.core.sequence import Sequence
from recserve.engine.capture import GraphSet
from recserve.engine.kv_cache import KVCache
from recserve.engine.runner import DeviceLost, Runner
from recserve.kernels.tree_batch import TreeBatch
from recserve.speculation.completion import TextQuery

log = logging.getLogger(__name__)


SequenceT = TypeVar("SequenceT", bound=Sequence)


class Trees(Protocol):
    """Trees of requests that are verified together.

    Attributes:
        sequences: The requests.
    """

    @property
    def sequences(self) -> Seq[Sequence]:
        """The requests."""
        ...


TreesT = TypeVar("TreesT", bound=Trees)

GROUP_DELAY_S = 0.5  # each further group of one body counts as if it came so much later

# Errors that say nothing about the device.
HARMLESS = (DeadlineExceeded, EngineStopped, NotFinite)


class RequestTooLarge(ValueError):
    """A request needs more pages than the pool has, even when nothing else runs."""


@dataclass(frozen=True)
class Chunk(Generic[SequenceT]):
    """The next tokens of a prefix, computed in one step.

    Attributes:
        sequence: The request.
        size: Number of tokens.
    """

    sequence: SequenceT
    size: int


class Scheduler(ABC, Generic[SequenceT, TreesT]):
    """Admits the requests of one model, steps them, and delivers their results.

    `step` is the loop of every model. Subclasses say what searches and texts do differently: which
    requests have pages, what the next forward pass computes, and what becomes of its states.

    An admitted request stays among `admitted` until `_end` has noted its result. A step that fails
    can therefore lose no request:

    - Results that were noted before the error are delivered.
    - Every other request of the step is a suspect. Each suspect is tried alone, so that a request
      that makes the forward pass fail does not fail its neighbours. Those that step alone without
      an error are cleared. They continue together after all suspects have run.

    An error may come from the device rather than from a request. Whoever catches one hands it to
    `_end` or `fail`, which look at the device before the request gets the error.

    Attributes:
        runner: Runs the model.
        kv: Pages and cached prefixes of the model. Several schedulers may share them.
        delays_background: Whether a background request waits until nothing runs here.
        lost: Why the device fails every call. None while it works. The engine then ends.
        step_sizes: Steps of texts by their number of tokens (engine/stats.py). None does not
            count them.
    """

    delays_background: ClassVar[bool] = False

    def __init__(self, runner: Runner, kv: KVCache | None = None) -> None:
        """Shares `kv` with another scheduler of the same runner, if given."""
        self.runner, self.kv = runner, kv or KVCache(runner.pool)
        self.lost: DeviceLost | None = None
        self.step_sizes: Counter[int] | None = None
        self._results: list[tuple[SequenceT, Any]] = []
        self._suspects: deque[SequenceT] = deque()
        self._cleared: deque[SequenceT] = deque()

    @property
    def num_running(self) -> int:
        """Number of requests that were admitted and have no result."""
        return self.num_admitted + len(self._suspects) + len(self._cleared)

    @property
    def isolating(self) -> bool:
        """Whether suspects are tried one by one. No other request may be admitted meanwhile."""
        return bool(self._suspects or self._cleared)

    @property
    @abstractmethod
    def admitted(self) -> list[SequenceT]:
        """Running requests that have pages or wait for them."""

    @property
    @abstractmethod
    def num_admitted(self) -> int:
        """Number of requests in `admitted`."""

    @abstractmethod
    def sequence_of(
        self, request: Any, future: Future[Any], method: Any, model: str, client: Client
    ) -> SequenceT:
        """Returns a submitted request. It is safe to call from any thread.

        Args:
            request: The request.
            future: Receives its result.
            method: Its strategy or drafter.
            model: Name of its model.
            client: Who sends it.
        """

    def draft_health(self) -> dict[str, DraftHealth]:
        """Returns the acceptance of recent drafts by drafter; safe to call from any thread."""
        return {}

    @abstractmethod
    def check(self, sequence: SequenceT) -> None:
        """Raises ValueError if the request cannot run, even alone."""

    @abstractmethod
    def admit(self, sequence: SequenceT) -> bool:
        """Takes a request in. Returns False if other requests hold the pages that it needs."""

    @abstractmethod
    def settle(self) -> None:
        """Starts and ends the requests that need no forward pass for it."""

    @abstractmethod
    def schedule(self) -> tuple[Seq[Chunk[SequenceT]], Seq[TreesT]]:
        """Drafts, and returns what the next forward pass computes: prefixes and trees.

        It may take pages from requests. Those whose draft fails end.
        """

    @abstractmethod
    def chunk_batch(self, chunk: Chunk[SequenceT]) -> TreeBatch:
        """Returns the tokens of a prefix as a chain under those before them."""

    @abstractmethod
    def tree_batch(self, trees: TreesT) -> TreeBatch:
        """Returns trees with their slots."""

    @abstractmethod
    def finish_prefill(self, chunks: Seq[Chunk[SequenceT]], states: Seq[Any]) -> None:
        """Marks chunks as computed, and caches the prefixes that are complete."""

    @abstractmethod
    def verify(self, trees: TreesT, batch: TreeBatch, states: Any) -> None:
        """Continues the requests of trees from the states of the nodes."""

    def forward(self, parts: Seq[TreeBatch]) -> Seq[Any]:
        """Returns the states of each part."""
        return self.runner.forward(parts)

    @property
    def graph_sets(self) -> Mapping[str, GraphSet[Any]]:
        """What `replay` uses, by the name of the kind: `steps`, `drafts`,
        `searches` or `prefills`."""
        return {}

    def replay(
        self, chunks: Seq[Chunk[SequenceT]], trees: Seq[TreesT]
    ) -> tuple[Seq[Chunk[SequenceT]], Seq[TreesT]]:
        """Computes and verifies what captured functions hold, and returns the rest.

        This is the only place where a CUDA graph replaces the launches of a step.
        """
        return chunks, trees

    @abstractmethod
    def drop_all(self) -> list[SequenceT]:
        """Removes and returns all admitted requests. `readmit` starts each of them again."""

    def readmit(self, sequence: SequenceT) -> bool:
        """Takes a dropped request in again. Returns False if pages are missing."""
        return self.admit(sequence)

    @abstractmethod
    def drop_cancelled(self) -> None:
        """Removes cancelled requests."""

    @abstractmethod
    def _remove(self, sequences: Seq[SequenceT]) -> None:
        """Removes admitted requests and releases what they hold."""

    def give_way(self, other: Sequence) -> SequenceT | None:
        """Removes and returns the request that is served last, if `other` is served before it.

        The returned request continues after another `admit` from what it has computed. None by
        default: requests that end within a few steps keep their place.
        """
        return None

    @abstractmethod
    def pages_to_admit(self, sequence: SequenceT) -> int:
        """Returns how many free pages let `admit` take a request. 0 if it waits for others to end,
        whatever pages are free.
        """

    def free_pages(self, count: int, other: Sequence) -> bool:
        """Takes pages from requests that are served after `other`, until `count` pages are free.

        Returns False, and takes none, if these requests have too few pages, or if `count` pages are
        free already. By default a request keeps its pages until it ends.
        """
        return False

    def lacks_pages_before(self, other: Sequence) -> bool:
        """Returns whether a request that was admitted, and is served before `other`, has no pages.

        `other` may not take the pages that it waits for. Here it is a suspect that found no pages.
        """
        if not (self._suspects or self._cleared) or self.num_admitted:
            return False
        return any(
            service_order(s) <= service_order(other) for s in (*self._suspects, *self._cleared)
        )

    def pause(self) -> Seq[SequenceT]:
        """Removes and returns requests that can continue later from what they have computed.

        None by default: requests that end within a few steps run to their end.
        """
        return ()

    def step(self, cancelled: bool = False) -> None:
        """Takes all running requests one forward pass further, and delivers those that end.

        settle -> schedule -> forward or replay -> verify -> settle -> deliver

        Args:
            cancelled: Whether a request may have been cancelled since the last step.
        """
        if self.isolating and not self.num_admitted:
            self._readmit()
        try:
            if cancelled:
                self.drop_cancelled()
            self.settle()
            self._deliver()
            began = time.perf_counter()
            chunks, trees = self.schedule()
            if chunks or trees:
                self._compute(chunks, trees, began)
                self.settle()
            self._deliver()
            if self.isolating:
                self._cleared.extend(self.pause())
        except BaseException as raised:
            error = request_error(raised)
            log.exception("a step failed")
            self._deliver()
            self._check_device()
            if self.lost is None:
                self._isolate(error)

    def _compute(self, chunks: Seq[Chunk[SequenceT]], trees: Seq[TreesT], began: float) -> None:
        """Runs one forward pass over the chunks and trees, which `schedule` began to choose at
        `began`.

        A request whose prefix ends may have its first tree in the same pass. In each layer, keys
        and values of all rows are written before any row attends to them.
        """
        drafted = time.perf_counter()
        prefills, rest = self.replay(chunks, trees)
        if prefills or rest:
            parts = [self.tree_batch(one) for one in rest]
            if prefills:
                parts = [self.chunk_batch(chunk) for chunk in prefills] + parts
            states, count = self.forward(parts), len(prefills)
            if prefills:
                self.finish_prefill(prefills, states[:count])
            for one, batch, own in zip(rest, parts[count:], states[count:], strict=True):
                self.verify(one, batch, own)
        draft_ms, forward_ms = (drafted - began) * 1e3, (time.perf_counter() - drafted) * 1e3
        first = [chunk.sequence for chunk in chunks] if chunks else ()
        for chunk in chunks:
            chunk.sequence.timing.prefill_ms += forward_ms
        for one in trees:
            for member in one.sequences:
                timing = member.timing
                timing.draft_ms += draft_ms
                if member not in first:
                    timing.verify_ms += forward_ms

    def fail(self, future: Future[Any], error: Exception) -> None:
        """Sets a future to an error, or to EngineStopped if the device is lost."""
        if not isinstance(error, HARMLESS):
            self._check_device()
        if self.lost is not None:
            error = EngineStopped("the engine has stopped")
        try:
            future.set_exception(error)
        except InvalidStateError:
            log.debug("a request was cancelled before its error: %s", error)

    def fail_all(self, error: EngineStopped) -> None:
        """Delivers what has ended, and fails all other running requests. They keep their pages.

        Another thread may call it while a step hangs.
        """
        self._deliver()
        for sequence in [*self._suspects, *self._cleared, *self.admitted]:
            self.fail(sequence.future, error)

    def abandon(self, error: EngineStopped) -> None:
        """Fails all running requests, whatever the device says, and releases their pages."""
        self.fail_all(error)
        self._suspects.clear()
        self._cleared.clear()
        try:
            self.drop_all()
        except BaseException as raised:
            log.error(
                "the pages of ended requests could not be released", exc_info=request_error(raised)
            )

    def _check_pages(self, pages: int, rows: str) -> None:
        """Raises RequestTooLarge if no request gets so many pages. `rows` says what needs them."""
        most = self.kv.width // self.kv.page_size
        if most < pages <= self.kv.allocator.num_pages:
            raise RequestTooLarge(
                f"{rows} need {pages} pages of {self.kv.page_size} tokens, a request gets at most "
                f"{most}; request less"
            )
        if pages > self.kv.allocator.num_pages:
            raise RequestTooLarge(
                f"{rows} need {pages} pages of {self.kv.page_size} tokens, the pool has "
                f"{self.kv.allocator.num_pages}; request less or raise kv_bytes"
            )

    def _end(self, results: Seq[tuple[SequenceT, Any]]) -> None:
        """Ends requests: notes their results or errors for delivery, and removes them."""
        for sequence, result in results:
            sequence.nonfinite |= isinstance(result, NotFinite)
        self._results += results
        self._remove([sequence for sequence, _ in results])

    def _deliver(self) -> None:
        """Sets the futures of the ended requests."""
        results, self._results = self._results, []
        for sequence, result in results:
            if isinstance(result, Exception):
                self.fail(sequence.future, result)
                continue
            sequence.timing.total_ms = (time.monotonic() - sequence.submitted_s) * 1e3
            if has_expired(sequence.request):
                late = DeadlineExceeded("the deadline passed while the request ran")
                self.fail(sequence.future, late)
                continue
            try:
                sequence.future.set_result(result)
            except InvalidStateError:
                log.debug("a result is ready after its request was cancelled")

    def _check_device(self) -> None:
        """Notes if the device fails every call since an earlier error."""
        if self.lost is None:
            try:
                self.runner.check_device()
            except DeviceLost as lost:
                self.lost = lost

    def _isolate(self, error: Exception) -> None:
        """Makes the requests of a failed step suspects. A request that failed alone gets the
        error.
        """
        dropped = [sequence for sequence in self.drop_all() if not sequence.future.done()]
        if len(dropped) == 1:
            self.fail(dropped[0].future, error)
        else:
            self._suspects.extend(dropped)

    def _readmit(self) -> None:
        """Starts the next suspect, or all cleared requests if no suspect is left."""
        waiting, most = (self._suspects, 1) if self._suspects else (self._cleared, None)
        while waiting and (most is None or self.num_admitted < most):
            sequence = waiting.popleft()
            if sequence.future.cancelled():
                continue
            try:
                admitted = self.readmit(sequence)
            except BaseException as raised:
                error = request_error(raised)
                self.fail(sequence.future, error)
                continue
            if not admitted:
                waiting.appendleft(sequence)
                return


class StepLock:
    """A fair lock with room for one waiter. The engine holds it during a step.

    Changes between two steps take it too. With a plain lock, the releasing thread often takes the
    lock again before the waiting thread wakes. A busy engine could then run twenty steps before a
    prefix is dropped.
    """

    def __init__(self) -> None:
        self._line, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._line:
            self._held.acquire()

    def __exit__(self, *raised: object) -> None:
        self._held.release()


def service_order(sequence: Sequence) -> tuple[int, float]:
    """Returns the order in which requests are served: by priority, then by age.

    The later groups of a large body give way to the requests of other bodies.
    """
    request, submitted_s = sequence.request, sequence.submitted_s
    if isinstance(request, TextQuery):
        return request.priority, submitted_s + request.group * GROUP_DELAY_S
    if isinstance(request, TextScoreQuery | PromptQuery):
        return 0, submitted_s + request.group * GROUP_DELAY_S
    return 0, submitted_s


def has_expired(request: Request | TextQuery) -> bool:
    """Returns whether the request's deadline has passed."""
    return request.deadline_s is not None and time.monotonic() > request.deadline_s
