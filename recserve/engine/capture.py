"""CUDA graphs: a function of fixed shapes is captured once per bucket and replayed by one launch.

`GraphSet` is the base of the four kinds of graphs: prefills (below), searches
(beam_search_graph.py), text steps (text_step_graph.py) and drafts (draft_graph.py). Their functions
share nothing. A prefill is the plainest.

The host needs hundreds of microseconds to launch a layer. For up to about a thousand rows the
device computes it in less, so the prefill of one request waits for the host: a new history, or a
new event behind a cached one. A graph holds the layers for up to a number of rows. Its inputs are
embedded outside, because tables of items may move. They lie in buffers at fixed addresses. Rows
after the prefill's own form a second tree, without a prefix, that writes to the spare slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from recserve.engine.kv_cache import KVCache
from recserve.engine.runner import Runner
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.language_model import LanguageModel
from recserve.models.semantic_id_model import SemanticIdModel

log = logging.getLogger(__name__)

WARM_UP = 2
NO_LOCK: AbstractContextManager[object] = nullcontext()

T = TypeVar("T")


class Recorder(Protocol):
    """Captures functions without arguments.

    Attributes:
        bytes: Memory of all captures so far.
        compile_s: Time in which captures compiled kernels and started libraries, so far.
    """

    bytes: int
    compile_s: float

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        """Captures a function and returns its replay."""
        ...


class EagerRecorder:
    """Captures nothing: a replay runs the function again. It stands in for CUDA on a CPU."""

    def __init__(self) -> None:
        self.bytes = 0
        self.compile_s = 0.0

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        """As Recorder."""
        return step


class CudaRecorder:
    """Captures functions without arguments as CUDA graphs.

    All graphs share one memory pool. They share one stream too, because libraries keep a workspace
    for each stream.

    Attributes:
        bytes: Memory of all graphs so far.
        compile_s: Time in which warm-ups compiled kernels and started libraries, so far.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._capturing: torch.cuda.CUDAGraph | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.bytes = 0
        self.compile_s = 0.0

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        """Captures a function and returns its replay.

        The outputs of a replay stay in the memory that the capture gave them. If the capture fails,
        the caller's stream becomes current again, and later captures use another memory pool.
        """
        current = torch.cuda.current_stream()
        try:
            return self._capture(step)
        except BaseException:
            # If torch cannot end the capture, it leaves its own stream current.
            torch.cuda.set_stream(current)
            self._end_allocations()
            torch.cuda.synchronize()
            raise

    def _end_allocations(self) -> None:
        """Ends the allocations of a capture that torch could not end.

        Up to torch 2.11, a capture that fails leaves the allocator in its capturing state, with a
        pointer to the graph. Then memory is no longer given back, and `empty_cache` fails.
        """
        if self._capturing is None:
            return
        self._failed.append(self._capturing)  # must outlive the allocator's pointer
        self._capturing = None
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(RuntimeError):  # torch has ended them, as from 2.12 on
                end(torch.cuda.current_device(), self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, step: Callable[[], T]) -> Callable[[], T]:
        with suppress(RuntimeError):  # the allocator is capturing elsewhere; only memory is lost
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            times = [time.monotonic()]
            for _ in range(WARM_UP):  # the first compiles kernels and allocates workspaces
                step()
                times.append(time.monotonic())
        # Launches do not wait for the device, so a later run tells what launching takes.
        self.compile_s += max(2 * times[1] - times[0] - times[2], 0.0)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device during the capture.
        self._capturing = graph
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            outputs = step()
        self._capturing = None
        self.bytes += max(torch.cuda.memory_reserved() - before, 0)

        def replay() -> T:
            graph.replay()
            return outputs

        return replay


class Bucket(Protocol):
    """What one graph is captured for: a shape, and what the function does for it."""

    @property
    def name(self) -> str:
        """Unique among the graphs of an engine. Logs and statistics show it."""


@dataclass(frozen=True, kw_only=True)
class CaptureLimits:
    """How much time and memory captures may take.

    Attributes:
        seconds: No capture starts after this many seconds. The time in which kernels compile does
            not count, so that a cold cache of compiled kernels costs no graph.
        bytes: No capture starts once all captures have taken more than this. A bucket that needs
            more by itself is not captured.
    """

    seconds: float = 60.0
    bytes: int = 2 * 2**30


class CapturedGraph(Generic[T]):
    """A function of fixed shapes that reads and writes fixed addresses, and its replay.

    The function is `__call__`. Its inputs are loaded before a replay.

    Attributes:
        bucket: What it is captured for.
        replay: Runs the graph on the loaded inputs and returns the outputs. The next replay
            overwrites them. `GraphSet.capture` sets this and the following attributes.
        seconds: Time that the capture took.
        bytes: Memory that the capture took.
    """

    bucket: Bucket
    replay: Callable[[], T]
    seconds: float
    bytes: int

    def __call__(self) -> T:
        """Runs the function on the loaded inputs."""
        raise NotImplementedError


GraphT = TypeVar("GraphT", bound=CapturedGraph[Any])
BucketT = TypeVar("BucketT", bound=Bucket)


class GraphSet(Generic[GraphT]):
    """The graphs of one kind of function, for one model.

    Attributes:
        captured: The graphs, from small to large.
        missing: Names of buckets without a graph. The log says why.
        counts: Number of calls by result. `replayed` used a graph.
    """

    def __init__(self, recorder: Recorder, limits: CaptureLimits, results: Seq[str]) -> None:
        """Captures nothing yet.

        Args:
            recorder: Captures the functions.
            limits: How much time and memory captures may take.
            results: Results that are counted.
        """
        self.recorder, self.limits = recorder, limits
        self.captured: list[GraphT] = []
        self.missing: list[str] = []
        self.counts: dict[str, int] = dict.fromkeys(results, 0)

    def capture(
        self,
        buckets: Seq[BucketT],
        build: Callable[[BucketT], GraphT],
        min_bytes: Callable[[BucketT], int] = lambda bucket: 0,
        lock: AbstractContextManager[object] = NO_LOCK,
        go_on: Callable[[], bool] = lambda: True,
    ) -> list[GraphT] | None:
        """Returns a graph for each bucket in order, or None if `go_on` ended the captures.

        Buckets that the limits exclude are logged and get no graph. The first capture that fails
        ends the captures. The set changes only in `use`.

        Args:
            buckets: What is captured.
            build: Makes the function of a bucket.
            min_bytes: Returns a lower bound of the memory that a bucket's function needs.
            lock: Held during a capture. If graphs are in use, it stays free between two captures
                for as long as the last one took.
            go_on: Called before each capture. False ends the captures.
        """
        graphs, excluded = list[GraphT](), list[str]()
        began, before, in_use = self._clock(), self.recorder.bytes, bool(self.captured)
        for bucket in buckets:
            late = self._clock() - began > self.limits.seconds
            size = max(self.recorder.bytes - before, min_bytes(bucket))
            if late or size > self.limits.bytes:
                excluded.append(bucket.name)
                continue
            if not go_on():
                return None
            try:
                with lock:
                    graphs.append(self._capture(build, bucket))
            except Exception:  # Triton's errors have no narrower base
                log.exception(
                    "no graph of %s: its capture failed, and its kernels are launched one by one",
                    bucket.name,
                )
                break
            if in_use:
                time.sleep(graphs[-1].seconds)
        if excluded:
            log.warning(
                "no graphs of %s: the limits of capture time or memory are reached",
                ", ".join(excluded),
            )
        return graphs

    def use(self, graphs: list[GraphT], buckets: Seq[Bucket]) -> None:
        """Replaces the graphs by those that were captured for some buckets."""
        names = {graph.bucket.name for graph in graphs}
        self.captured = graphs
        self.missing = [bucket.name for bucket in buckets if bucket.name not in names]

    def _capture(self, build: Callable[[BucketT], GraphT], bucket: BucketT) -> GraphT:
        began, before = time.monotonic(), self.recorder.bytes
        graph = build(bucket)
        graph.replay = self.recorder(graph)
        graph.seconds, graph.bytes = time.monotonic() - began, self.recorder.bytes - before
        log.info("captured %s: %.2f s, %.0f MiB", bucket.name, graph.seconds, graph.bytes / 2**20)
        return graph

    def _clock(self) -> float:
        """Returns the time without that of compilations, in seconds."""
        return time.monotonic() - self.recorder.compile_s


def is_cuda(device: torch.device) -> bool:
    """Whether graphs can be captured on a device."""
    return device.type == "cuda" and torch.cuda.is_available()


Model = SemanticIdModel | LanguageModel
PREFILL_STATES = 16  # most last rows whose states are read: the last token, and placeholders
PREFILL_LIMITS = CaptureLimits(seconds=20.0, bytes=2**30)
# The outcome of a step that computes a prefix. `replayed` used a graph. The others were launched,
# because of company: other prefixes in the forward pass, or trees of items; size: its rows, states
# or prefix.
PrefillResult = Literal["replayed", "company", "size"]
PREFILL_RESULTS: tuple[PrefillResult, ...] = get_args(PrefillResult)


@dataclass(frozen=True)
class PrefillBucket:
    """What one graph of a prefill is captured for.

    Attributes:
        rows: Rows of the graph. A prefill has fewer, so that the second tree is not empty.
        text: Whether it is a graph of the language model.
    """

    rows: int
    text: bool = False

    @property
    def name(self) -> str:
        """For example `prefill 64`, the most rows of a prefill, or `text prefill 64`."""
        return f"{'text ' if self.text else ''}prefill {self.rows - 1}"


# On an H200 a launched prefill of a model with 28 layers keeps the host busy for 10 to 17 ms, and
# the device for 5.7 ms at 1,001 rows (docs/results/gpu.md).
PREFILL_BUCKETS = tuple(PrefillBucket(rows + 1) for rows in (16, 64, 256, 512, 1024))
# A step computes at most 512 tokens of a prompt (`TextLimits.prefill_tokens`).
TEXT_PREFILL_BUCKETS = tuple(PrefillBucket(bucket.rows, True) for bucket in PREFILL_BUCKETS[:-1])


class PrefillGraph(CapturedGraph[Tensor]):
    """The layers over a chain of at most `rows - 1` embedded tokens under a cached prefix."""

    def __init__(self, runner: Runner, kv: KVCache, model: Model, bucket: PrefillBucket) -> None:
        """Allocates the buffers.

        Args:
            runner: The runner of the model.
            kv: The cache, whose slot table the graph reads.
            model: Its decoder runs.
            bucket: Rows of the graph.
        """
        pool, weight, rows = runner.pool, model.tokens.weight, bucket.rows
        self.runner, self.kv, self.model, self.bucket = runner, kv, model, bucket
        device, self.rows = weight.device, rows
        self._x = weight.new_zeros(rows, weight.shape[1])
        self._slots = torch.full((rows,), pool.spare_slot, device=device)
        # Prefixes of both trees, and where the trees begin and end.
        self._starts = torch.zeros(2, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(2, dtype=torch.int64, device=device)
        self._offsets = torch.zeros(3, dtype=torch.int64, device=device)
        self._offsets[1:].fill_(rows)
        self._offsets[1:2].fill_(1)
        self._index = torch.arange(rows, device=device)
        self._last = torch.arange(PREFILL_STATES, device=device) - PREFILL_STATES

    def load(self, batch: TreeBatch, x: Tensor) -> None:
        """Copies a prefill and its embedded tokens x [n, E] to the buffers, without a host wait."""
        count, prefixes = x.shape[0], batch.prefixes
        self._x[:count].copy_(x)
        self._slots[:count].copy_(batch.slots)
        self._slots[count:].fill_(self.runner.pool.spare_slot)
        (start,), (length,) = prefixes.on_host()
        self._starts[:1].fill_(start)
        self._lengths[:1].fill_(length)
        self._offsets[1:2].fill_(count)

    def __call__(self) -> Tensor:
        """Returns [PREFILL_STATES, E] the last states of the loaded prefill, in order."""
        count = self._offsets[1]
        own = self._index < count
        tree = TokenTree(
            tokens=self._index,  # not read
            parents=self._index - 1,  # not read
            depths=torch.where(own, self._index, self._index - count),
            ends=torch.where(own, count, self.rows),
            offsets=self._offsets,
        )
        most = self.model.config.decoder.max_positions
        prefixes = Prefixes.on_device(self.kv.slots, self._starts, self._lengths, most)
        batch = TreeBatch(tree, None, self._slots, prefixes, fillers=1, fixed_shapes=True)
        return self.runner.compute(batch, self._x, (self._last + count).clamp(min=0))


class PrefillGraphs(GraphSet[PrefillGraph]):
    """The captured prefills of one model."""

    @torch.inference_mode()
    def __init__(
        self,
        runner: Runner,
        kv: KVCache,
        model: Model,
        recorder: Recorder,
        limits: CaptureLimits = PREFILL_LIMITS,
        buckets: tuple[PrefillBucket, ...] = PREFILL_BUCKETS,
    ) -> None:
        """Captures all prefills.

        Args:
            runner: The runner of the model.
            kv: The cache of the model.
            model: The model.
            recorder: Captures the prefills.
            limits: How much time and memory that may take.
            buckets: What is captured, from few rows to many.
        """
        super().__init__(recorder, limits, PREFILL_RESULTS)
        self._model, longest = model, model.config.decoder.max_positions
        # The largest history needs one graph that holds it, and none beyond.
        usable = [b for n, b in enumerate(buckets) if not n or buckets[n - 1].rows <= longest]
        self.use(self.capture(usable, partial(PrefillGraph, runner, kv, model)) or [], usable)

    def replay(self, batch: TreeBatch) -> Tensor | None:
        """Returns the states of a prefill [num_states, E], or None if no graph holds it."""
        graph, states = self._choose_graph(batch), batch.num_states
        if graph is None or states is None:
            self.counts["size"] += 1
            return None
        self.counts["replayed"] += 1
        graph.load(batch, self._model.embed(batch.inputs.tokens))
        return graph.replay()[PREFILL_STATES - states :].clone()

    def _choose_graph(self, batch: TreeBatch) -> PrefillGraph | None:
        count, states = len(batch.inputs), batch.num_states
        if states is None or not 0 < states <= min(PREFILL_STATES, count):
            return None
        if len(batch.prefixes) != 1 or batch.tree.shared is not None:
            return None
        if batch.prefixes.longest > self._model.config.decoder.max_positions:
            return None
        return next((graph for graph in self.captured if count < graph.rows), None)


def cuda_prefills(
    runner: Runner,
    kv: KVCache,
    model: Model,
    enabled: bool | None,
    limits: CaptureLimits = PREFILL_LIMITS,
    buckets: tuple[PrefillBucket, ...] = PREFILL_BUCKETS,
) -> PrefillGraphs | None:
    """Captures the prefills of a model on a CUDA device. Returns None on others, or if not enabled.

    Args:
        runner: The runner of the model.
        kv: The cache of the model.
        model: The model.
        enabled: False disables graphs.
        limits: How much time and memory that may take.
        buckets: What is captured, from few rows to many.
    """
    if enabled is False or not is_cuda(runner.pool.keys.device):
        return None
    return PrefillGraphs(runner, kv, model, CudaRecorder(), limits, buckets)
