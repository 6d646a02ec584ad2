"""Statistics of the engine: queues, running requests, pages, CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from recserve.core.draft_policy import DraftHealth


@dataclass(frozen=True)
class EngineStats:
    """Figures at one moment.

    Attributes:
        queue_depth: Requests that wait for admission.
        running: Requests that are admitted and have no result.
        pages_free: Free pages, over all models.
        pages_cached: Pages that the prefix caches hold.
        pages_total: All pages.
        slots_total: Tokens that all pages hold.
        prefix_hit_tokens: Prefix tokens found in a prefix cache so far.
        prefix_missed_tokens: Prefix tokens not found in a prefix cache so far.
        background: Background requests, waiting or running. The other figures exclude them.
        graph_steps: Text steps by outcome (engine/text_step_graph.py).
        graph_drafts: Drafts of texts together by outcome (engine/draft_graph.py).
        graph_searches: Searches by outcome (engine/beam_search_graph.py).
        graph_prefills: Prefills by outcome (engine/capture.py).
        graph_seconds: Capture time of each graph, by its name.
        graph_bytes: Memory of each graph, by its name.
        unrecorded: Names of the graphs that could not be captured.
        drafts: Acceptance of recent drafts, by drafter or strategy. A strategy with several
            drafters has an entry for each: its name, a space, and the drafter's.
        device: Type of the device.
        step_tokens: Steps in which the language model wrote a token, by their number of tokens:
            those written, and the prompts of the texts that got their first one. None unless
            `EngineConfig.count_steps` is set.
    """

    queue_depth: int
    running: int
    pages_free: int
    pages_cached: int
    pages_total: int
    prefix_hit_tokens: int
    prefix_missed_tokens: int
    slots_total: int = 0
    background: int = 0
    graph_steps: Mapping[str, int] = field(default_factory=dict)
    graph_drafts: Mapping[str, int] = field(default_factory=dict)
    graph_searches: Mapping[str, int] = field(default_factory=dict)
    graph_prefills: Mapping[str, int] = field(default_factory=dict)
    graph_seconds: Mapping[str, float] = field(default_factory=dict)
    graph_bytes: Mapping[str, int] = field(default_factory=dict)
    unrecorded: Seq[str] = ()
    drafts: Mapping[str, DraftHealth] = field(default_factory=dict)
    device: str = "cpu"
    step_tokens: Mapping[int, int] | None = None
