"""What the engine asks of CUDA itself, which no pretended device has: in which order, of what."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from recserve.engine import capture
from recserve.engine.capture import (
    WARM_UP,
    CapturedGraph,
    CaptureLimits,
    CudaRecorder,
    GraphSet,
)
from recserve.kernels.attention import triton_launch
from recserve.kernels.cache import triton_fp8
from tests.support import triton_interpreter  # noqa: F401
from tests.support.recorder import CpuRecorder


class Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def calls(monkeypatch):
    """Everything that was asked, in order; memory grows by 100 bytes whenever it is looked at."""
    found, memory = [], iter(range(100, 10_000, 100))

    @contextmanager
    def inside(name):
        found.append(f"begin {name}")
        yield
        found.append(f"end {name}")

    def graph(made, pool, stream, capture_error_mode):
        return inside(f"record {made.number} in {pool} on {stream.name}, {capture_error_mode}")

    pools = iter(("the pool", "a second pool", "a third pool"))

    def made():
        number = sum(call.startswith("graph") for call in found)
        found.append(f"graph {number}")
        return SimpleNamespace(number=number, replay=lambda: found.append(f"replay {number}"))

    fakes = {
        "graph_pool_handle": lambda: next(pools),
        "empty_cache": lambda: found.append("empty cache"),
        "memory_reserved": lambda: next(memory),
        "Stream": lambda: Stream("side", found),
        "current_stream": lambda: Stream("main", found),
        "stream": lambda stream: inside(stream.name),
        "set_stream": lambda stream: found.append(f"{stream.name} is current"),
        "current_device": lambda: 0,
        "synchronize": lambda: found.append("synchronize"),
        "CUDAGraph": made,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    # Builds of torch for CUDA have it, and it takes no name of a pool.
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    return found


def test_a_step_is_warmed_up_beside_then_recorded_once(calls):
    recorder, outputs = CudaRecorder(), []

    def step():
        calls.append("step")
        outputs.append(object())
        return outputs[-1]

    replay = recorder(step)
    assert calls == [
        "empty cache",
        "side waits for main", "begin side", *["step"] * WARM_UP, "end side", "main waits for side",
        "graph 0", "begin record 0 in the pool on side, thread_local", "step",
        "end record 0 in the pool on side, thread_local",
    ]  # fmt: skip
    before = len(calls)
    assert replay() is outputs[-1] and replay() is outputs[-1]
    assert calls[before:] == ["replay 0"] * 2
    other = recorder(step)
    assert "begin record 1 in the pool on side, thread_local" in calls
    replay(), other()
    assert calls[-2:] == ["replay 0", "replay 1"]
    assert recorder.bytes == 200  # 100 each


@pytest.mark.parametrize("where", ["warm-up", "end"])
def test_a_record_that_fails_leaves_the_stream_as_it_was(where, calls, monkeypatch):
    """torch leaves the capture's stream current where it cannot end the capture."""

    class Capture:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            calls.append("side is current")

        def __exit__(self, *_):
            raise RuntimeError("the capture was invalidated")

    def step():
        calls.append("step")
        if where == "warm-up":
            raise RuntimeError("a kernel that does not compile")

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="invalidated" if where == "end" else "not compile"):
        recorder(step)
    assert [call for call in calls if "step" not in call][-2:] == ["main is current", "synchronize"]
    assert calls.count("step") == (WARM_UP + 1 if where == "end" else 1)


@pytest.mark.parametrize("ended", [False, True], ids=["torch 2.11", "torch 2.12"])
def test_after_a_failed_capture_the_allocator_captures_no_more(ended, calls, monkeypatch):
    """torch 2.11 leaves it capturing, with a pointer to the graph; 2.12 ends it itself."""
    capturing, alive = [], []

    class Graph:
        def __init__(self):
            alive.append(weakref.ref(self))

        def replay(self):
            pass

    class Capture:
        def __init__(self, graph, pool, *_, **__):
            self.pool = pool

        def __enter__(self):
            torch.cuda.empty_cache()  # as torch.cuda.graph does
            capturing.append(self.pool)

        def __exit__(self, kind, *_):
            if kind is None or ended:
                capturing.remove(self.pool)
            if kind is not None:
                raise RuntimeError("the capture was invalidated")

    def empty_cache():
        if capturing:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end(device, pool):
        if pool not in capturing:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        capturing.remove(pool)

    def breaks():
        if len(alive) == 1:
            raise ValueError("not capturable")

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="invalidated"):
        recorder(breaks)
    gc.collect()
    assert not capturing and alive[0]() is not None
    replay = recorder(lambda: calls.append("step"))
    assert not capturing and recorder._pool == "a second pool"
    replay()


def test_compilation_does_not_count_as_capture(calls, monkeypatch):
    """Each first warm-up takes 30 s of compiling, everything else a second a run."""
    now, seen = [0.0], set()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(capture, "time", clock)

    class Step(CapturedGraph):
        def __init__(self, bucket):
            self.bucket = bucket

        def __call__(self):
            now[0] += 1 if self.bucket.name in seen else 31
            seen.add(self.bucket.name)

    buckets = [SimpleNamespace(name=str(n)) for n in range(30)]
    for counted, captured in ((False, 20), (True, 2)):
        recorder, now[0] = CudaRecorder(), 0.0
        seen.clear()
        limits = CaptureLimits(seconds=59.5)
        graphs = GraphSet(CpuRecorder(recorder) if counted else recorder, limits, ())
        made = graphs.capture(buckets, Step)
        assert len(made) == captured
        assert recorder.compile_s == 30 * captured


def test_a_device_is_asked_what_it_has(monkeypatch):
    device = torch.device("cuda", 7)
    properties = SimpleNamespace(
        multi_processor_count=114, shared_memory_per_multiprocessor=102_400
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda requested: properties)
    triton_launch.machine_of.cache_clear()
    assert triton_launch.machine_of(device) == triton_launch.Machine(114, 102_400)
    assert triton_launch.machine_of(torch.device("cpu")) == triton_launch.HOPPER
    triton_launch.machine_of.cache_clear()
    for capability, native in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert triton_fp8.has_native(device) is native
