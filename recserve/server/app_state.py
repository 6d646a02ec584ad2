"""State that all requests of an application share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from recserve.experiments.serving.registry import Experiments
from recserve.metrics import Metrics
from recserve.schemas.items import RecommendRequest, RecommendResponse
from recserve.server.arms.arm_server import RemoteArm
from recserve.server.bundle_swaps import BundleSwaps
from recserve.server.inference_counts import InferenceCounts
from recserve.server.lifecycle import Lifecycle
from recserve.server.threads import Threads
from recserve.service.attribution import Signer
from recserve.service.slate_log.slate_log import SlateLog


@dataclass(frozen=True)
class AppState:
    """State that all requests of an application share.

    Attributes:
        lifecycle: Holds the service.
        metrics: Counters and histograms of the application.
        swaps: Replaces the service by one with another bundle.
        max_body_bytes: Upper bound on the size of a request body.
        default_timeout_ms: Timeout of an item request that does not set one.
        text_timeout_ms: Timeout of a text request that does not set one.
        slate_log: Log of slates and outcomes; None without one.
        experiments: Experiments of the server.
        stall_timeout_s: Time after which a step of the engine counts as hanging.
        copies: Requests of mode `shadow` in progress.
        arm_servers: Other servers of arms, by label of the arm.
        threads: Threads for work that must not hold the event loop.
        inferences: Answers of the Open Inference Protocol, by model and version.
    """

    lifecycle: Lifecycle
    metrics: Metrics
    swaps: BundleSwaps
    max_body_bytes: int
    default_timeout_ms: int
    text_timeout_ms: int
    slate_log: SlateLog | None = None
    experiments: Experiments = field(default_factory=Experiments)
    stall_timeout_s: float = 30.0
    copies: set[asyncio.Task[None]] = field(default_factory=set)
    arm_servers: Mapping[str, RemoteArm] = field(default_factory=dict)
    threads: Threads = field(default_factory=Threads)
    inferences: dict[tuple[str, str], InferenceCounts] = field(default_factory=dict)

    def log_slate(self, body: RecommendRequest, answer: RecommendResponse, signer: Signer) -> None:
        """Logs a slate that is about to be returned, if slates are logged."""
        if self.slate_log is not None:
            user = None if body.user is None else body.user.id
            self.slate_log.slate(user, answer, signer)
