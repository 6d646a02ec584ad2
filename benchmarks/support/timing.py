"""Time of a call on a device, and the peak rates of the device."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from recserve.kernels.native.processor import instructions, processor

FLUSH_BYTES = 2**32  # exceeds the caches, and takes longer than launching the call: 1 ms on an H200


class Deadline:
    """A time after which no row starts. `cut` is True if a row was left out because of it."""

    def __init__(self, seconds: float = float("inf")) -> None:
        """Sets the deadline to `seconds` from now."""
        self.moment_s = time.monotonic() + seconds
        self.cut = False

    def passed(self) -> bool:
        """Returns True after the deadline and then sets `cut`; call it before each row."""
        late = time.monotonic() > self.moment_s
        self.cut = self.cut or late
        return late


def milliseconds(
    call: Callable[[], object], device: str = "cpu", budget_s: float = 0.3, most: int = 100
) -> float:
    """Returns the median of repeated calls after two to warm up, within the budget.

    On CUDA, events time each call. Before it, a write empties the L2 cache and lasts longer than
    the call's launches, so that only the device's work is timed.
    """
    call()
    call()
    timed = _event_ms if device == "cuda" else _wall_ms
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or (len(times) < most and time.perf_counter() - began < budget_s):
        times.append(timed(call))
    return statistics.median(times)


def alternating(
    calls: dict[str, Callable[[], object]], budget_s: float = 4.0, most: int = 60
) -> dict[str, float]:
    """Returns medians on a shared CPU: the calls take turns, so that all meet the same load.

    With one thread, the process's CPU time counts, which leaves out waiting.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    # After one large block was freed, the allocator keeps freed memory, as in a serving process.
    torch.empty(30 * 2**20, dtype=torch.int8)
    for call in calls.values():
        call()
    began, rounds, names = time.perf_counter(), 0, list(calls)
    while rounds < 5 or (rounds < most and time.perf_counter() - began < budget_s):
        for name in names:
            times[name].append(_wall_ms(calls[name], clock))
        names.reverse()
        rounds += 1
    return {name: statistics.median(taken) for name, taken in times.items()}


def _wall_ms(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    call()
    return (clock() - began) * 1e3


def _event_ms(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def graph_milliseconds(call: Callable[[], object], launches: int = 20) -> float:
    """Returns the time of one call inside a CUDA graph of many, without launch gaps, caches warm.

    Raises:
        RuntimeError: If the call synchronises with the host, which a graph cannot hold.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return milliseconds(graph.replay, "cuda") / launches


def back_to_back_milliseconds(
    call: Callable[[], object], device: str = "cpu", calls: int = 10, runs: int = 5
) -> float:
    """Returns the time of one of many calls without pauses, with caches as the last call left them.

    It is the median over runs, after one to warm up.
    """
    call()
    if device != "cuda":
        return statistics.median(_wall_ms(call) for _ in range(runs))
    taken = []
    for _ in range(runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        taken.append(float(start.elapsed_time(stop)) / calls)
    return statistics.median(taken)


def host_microseconds(call: Callable[[], object], calls: int = 30) -> float:
    """Returns the host time to launch one call on CUDA, without waiting for its work."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken / calls * 1e6


def ceilings(device: str, smoke: bool = False) -> dict[str, float]:
    """Measures the peak rates of a device.

    Returns:
        GB/s of a large copy, bytes read plus written. TFLOP/s of a large product of random
        matrices, in bfloat16 on CUDA and float32 on a CPU.
    """
    big = device == "cuda" and not smoke
    source = torch.empty(2**31 if big else 2**26, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), device)
    n = 8192 if big else 512
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product_ms = milliseconds(lambda: left @ right, device)
    return {
        "copy_gb_s": 2 * source.numel() / copy_ms / 1e6,
        "matmul_tflop_s": 2 * n**3 / product_ms / 1e9,
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """Returns machine and versions, on which the figures depend."""
    facts: dict[str, Any] = {
        "device": device,
        "processor": processor().name,
        "instructions": instructions(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return facts
