"""Metrics of the process and of the Python runtime."""

from __future__ import annotations

import os
import threading

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client import Gauge as LiveGauge

TASKS = "/proc/self/task"  # Linux lists the threads of a process here


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Registers memory, processor time, open files, threads, garbage collection and versions."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    threads = LiveGauge("recserve_process_threads", "Threads of the process", registry=registry)
    threads.set_function(num_threads)


def num_threads() -> int:
    """Returns the number of threads, also of those that Python did not start, where known."""
    try:
        return len(os.listdir(TASKS))
    except OSError:
        return threading.active_count()
