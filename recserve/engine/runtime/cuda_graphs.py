"""CUDA graphs: a function of fixed shapes is captured once per bucket and replayed by one
launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

log = logging.getLogger(__name__)

WARM_UP = 2

T = TypeVar("T")


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


class GraphBucket(Protocol):
    """What one graph is captured for: a shape, and what the function does for it."""

    @property
    def name(self) -> str:
        """Unique among the graphs of a scheduler. Logs and statistics show it."""


BucketT = TypeVar("BucketT", bound=GraphBucket)
FunctionT = TypeVar("FunctionT")


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


@dataclass(frozen=True)
class CapturedGraph(Generic[BucketT, FunctionT, T]):
    """One captured function.

    Attributes:
        bucket: What it was captured for.
        seconds: Time that the capture took.
        bytes: Memory that the capture took.
        function: The function. Its inputs are loaded before a replay.
        replay: Runs the graph on the loaded inputs and returns the outputs. The next replay
            overwrites them.
    """

    bucket: BucketT
    seconds: float
    bytes: int
    function: FunctionT
    replay: Callable[[], T]


@dataclass(frozen=True)
class CapturePace:
    """How captures share the device with a running engine.

    Attributes:
        lock: Held while a graph is captured.
        proceed: Called before each capture. False ends the captures.
        pause: Whether to leave the lock free after each capture for as long as the capture took.
    """

    lock: AbstractContextManager[object]
    proceed: Callable[[], bool]
    pause: bool


AT_ONCE = CapturePace(nullcontext(), lambda: True, False)


class GraphCapture(Generic[BucketT, FunctionT, T]):
    """Captures one function for each bucket of a list."""

    def __init__(
        self,
        build: Callable[[BucketT], FunctionT],
        record: Callable[[FunctionT], Callable[[], T]],
        taken: Callable[[], int],
        limits: CaptureLimits,
        min_bytes: Callable[[BucketT], int] = lambda bucket: 0,
    ) -> None:
        """Describes the captures.

        Args:
            build: Makes the function of a bucket.
            record: Captures a function and returns its replay, as `CudaRecorder` does.
            taken: Returns the bytes that captures have taken so far.
            limits: Time and memory.
            min_bytes: Returns a lower bound of the memory that a bucket's function needs.
        """
        self._build, self._record, self._taken = build, record, taken
        self._limits, self._min_bytes = limits, min_bytes

    def __call__(
        self, buckets: Seq[BucketT], pace: CapturePace = AT_ONCE
    ) -> list[CapturedGraph[BucketT, FunctionT, T]] | None:
        """Returns the graphs in the order of the buckets, or None if `pace` ended the captures.

        Buckets that the limits exclude are logged and get no graph. The first capture that fails
        ends the captures.
        """
        made = list[CapturedGraph[BucketT, FunctionT, T]]()
        began, before, left = self._clock(), self._taken(), list[str]()
        for bucket in buckets:
            late = self._clock() - began > self._limits.seconds
            size = max(self._taken() - before, self._min_bytes(bucket))
            if late or size > self._limits.bytes:
                left.append(bucket.name)
                continue
            if not pace.proceed():
                return None
            try:
                with pace.lock:
                    made.append(self.one(bucket))
            except Exception:  # Triton's errors have no narrower base
                log.exception(
                    "no graph of %s: its capture failed, and its kernels are launched one by one",
                    bucket.name,
                )
                break
            if pace.pause:
                time.sleep(made[-1].seconds)
        if left:
            log.warning(
                "no graphs of %s: the limits of capture time or memory are reached", ", ".join(left)
            )
        return made

    def _clock(self) -> float:
        """Returns the time without that of compilations, in seconds."""
        recorder = self._record
        compile_s = recorder.compile_s if isinstance(recorder, CudaRecorder) else 0.0
        return time.monotonic() - compile_s

    def one(self, bucket: BucketT) -> CapturedGraph[BucketT, FunctionT, T]:
        """Returns the graph of one bucket."""
        began, before = time.monotonic(), self._taken()
        function = self._build(bucket)
        replay = self._record(function)
        seconds, size = time.monotonic() - began, self._taken() - before
        log.info("captured %s: %.2f s, %.0f MiB", bucket.name, seconds, size / 2**20)
        return CapturedGraph(
            bucket=bucket, seconds=seconds, bytes=size, function=function, replay=replay
        )


def missing_names(
    buckets: Iterable[BucketT], made: Iterable[CapturedGraph[BucketT, FunctionT, T]]
) -> list[str]:
    """Returns the names of buckets without a graph, in order."""
    names = {graph.bucket.name for graph in made}
    return [bucket.name for bucket in buckets if bucket.name not in names]


def is_cuda(device: torch.device) -> bool:
    """Whether graphs can be captured on a device."""
    return device.type == "cuda" and torch.cuda.is_available()
