"""Sizes of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recserve.engine.items.search_graphs import SearchLimits
from recserve.engine.text.graphs import GraphLimits


@dataclass(frozen=True)
class EngineConfig:
    """page_size: tokens per page. kv_bytes: key-value cache of each model; what is kept beside
    its roots (prefix_cache.py) comes on top. kv_dtype: how it is kept, None: as the model
    computes; `fp8` (kernels/fp8.py). max_queue: requests that may wait. max_running: requests that
    may share a model's forward. load_aware: text drafts are as large as the load lets them pay, or
    none. graphs: record text steps and searches as CUDA graphs at start, None: where there is CUDA;
    graph_limits, search_limits: which, and what that may take. invariant: no bit of an answer
    depends on other requests, drafts or what is cached (invariance.py), at a price; packed
    models on the CPU, and only the strategies for which it holds.
    """

    page_size: int = 16
    kv_bytes: int = 256 * 2**20
    kv_dtype: Literal["fp8"] | None = None
    max_queue: int = 1024
    max_running: int = 64
    load_aware: bool = False
    graphs: bool | None = None
    graph_limits: GraphLimits = GraphLimits()
    search_limits: SearchLimits = SearchLimits()
    invariant: bool = False
