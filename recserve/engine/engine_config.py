"""Sizes and modes of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recserve.engine.beam_search_graph import SearchLimits
from recserve.engine.capture import PREFILL_LIMITS, CaptureLimits
from recserve.engine.draft_graph import DraftLimits
from recserve.engine.text_step_graph import TextStepLimits


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of an engine.

    Attributes:
        page_size: Tokens per page.
        kv_bytes: Bytes of each model's key-value cache. The hidden states that the prefix cache
            stores with its prefixes need memory in addition. "auto" takes 256 MiB on a CPU, and on
            CUDA what weights, graphs and a tenth of the memory leave free, in equal parts.
        kv_dtype: Element type of the key-value caches. None selects each model's own type.
        max_queue: Most requests of each model that wait for admission.
        queue_share: Share of the places that other clients leave in a model's queue which one
            client may take. 1 sets no bound. Callers in this process have none.
        max_running: Most requests that share a model's forward pass.
        load_aware: Drafts text only as deep as pays under the current load: the throughput of the
            server counts. False drafts whenever drafts are accepted at all: the latency of one text
            on a machine with nothing else to do counts.
        graphs: Captures text steps, drafts, searches and prefills as CUDA graphs at start. None
            captures them on CUDA devices.
        graph_limits: Which text steps are captured, and how much time and memory that may take.
        draft_limits: Which drafts of text are captured, and how much time and memory that may take.
        search_limits: Which searches are captured, and how much time and memory that may take.
        prefill_limits: How much time and memory the captures of prefills may take.
        invariant: Makes every bit of a result independent of other requests, drafts and the cache
            (see engine/invariance.py). It needs packed models on a CPU and offers only the
            strategies that allow it.
        count_steps: Counts the tokens of each step of the language model, for
            `EngineStats.step_tokens`.
    """

    page_size: int = 16
    kv_bytes: int | Literal["auto"] = "auto"
    kv_dtype: Literal["fp8"] | None = None
    max_queue: int = 1024
    queue_share: float = 0.5
    max_running: int = 64
    load_aware: bool = True
    graphs: bool | None = None
    graph_limits: TextStepLimits = TextStepLimits()
    draft_limits: DraftLimits = DraftLimits()
    search_limits: SearchLimits = SearchLimits()
    prefill_limits: CaptureLimits = PREFILL_LIMITS
    invariant: bool = False
    count_steps: bool = False

    @property
    def item_graph_bytes(self) -> int:
        """Most bytes that the graphs of a recommender take on CUDA."""
        if self.graphs is False or self.invariant:
            return 0
        return self.search_limits.bytes + self.prefill_limits.bytes
