"""State that all item requests share: engine, catalogue snapshot, histories, versions."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any

import torch

from recserve.core.request import Timing
from recserve.engine.engine import Engine
from recserve.engine.stats import EngineStats
from recserve.kernels.native.processor import instruction_set
from recserve.metrics import Gauges
from recserve.schemas.items import UserRef
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.pending import Stopwatch
from recserve.service.recommend.attribution import Signer

if TYPE_CHECKING:
    from recserve.service.histories import Histories

log = logging.getLogger(__name__)


@dataclass
class Runtime:
    """Objects that all parts of a service with a bundle share.

    Attributes:
        engine: Runs the requests.
        snapshot: The catalogue version that new requests use.
        signer: Signs attribution tokens.
        model_version: Version of the bundle's models.
        device: Device of the models.
        illegal_items: Number of excluded or missing items that a model has returned; must stay 0.
        histories: Stored events of users; set when the parts are assembled.
    """

    engine: Engine
    snapshot: Snapshot
    signer: Signer
    model_version: str
    device: torch.device
    illegal_items: int = field(default=0)
    histories: Histories = field(init=False)

    def envelope(
        self,
        request_id: str | None,
        user: UserRef | None,
        snapshot: Snapshot,
        degraded: Sequence[str],
        watch: Stopwatch,
        timing: Timing | None,
    ) -> dict[str, Any]:
        """Returns the fields that recommend and rank responses share.

        Args:
            request_id: Identifies the request; None draws a random id.
            user: The user of the request; None for an anonymous history.
            snapshot: The catalogue version of the answer.
            degraded: Reasons why the answer is less than requested; duplicates are removed.
            watch: Stopwatch of the request.
            timing: Times of the engine's stages; None if the engine did not take part.

        Returns:
            Keyword arguments of the response, without `strategy`, `exact` and `rounds`.
        """
        request_id = request_id or str(uuid.uuid4())
        version = snapshot.items.name
        user_id = None if user is None else user.id
        return {
            "request_id": request_id,
            "model_version": self.model_version,
            "catalog_version": version,
            "degraded": list(dict.fromkeys(degraded)),
            "attribution_token": self.signer.token(
                request_id, user_id, self.model_version, version
            ),
            "timing_ms": watch.read(timing),
        }

    def versions(self) -> dict[str, str]:
        """Returns the versions of the models and of the catalogue."""
        return {"model_version": self.model_version, "catalog_version": self.snapshot.items.name}

    def illegal(self, count: int) -> None:
        """Counts and logs items that a model must not return.

        Args:
            count: Number of such items in one answer.
        """
        self.illegal_items += count
        log.error("a model returned %d items that do not exist or were excluded", count)

    def gauges(self) -> Gauges:
        """Returns the metrics of the engine for Prometheus."""
        return gauges_of(self.engine.stats(), self.illegal_items)


def build_info(device: str) -> dict[str, str]:
    """Returns the labels of `recserve_build_info` for models on a type of device."""
    return {
        "version": installed("recserve"),
        "torch": torch.__version__,
        "device": device,
        "isa": instruction_set() or "generic",
    }


def gauges_of(stats: EngineStats, illegal_items: int = 0) -> Gauges:
    """Returns an engine's statistics as Prometheus metrics."""
    used = stats.pages_total - stats.pages_free - stats.pages_cached
    return Gauges(
        queue_depth=stats.queue_depth,
        illegal_items=illegal_items,
        kv_pages={"free": stats.pages_free, "cached": stats.pages_cached, "used": max(used, 0)},
        prefix_tokens={"hit": stats.prefix_hit_tokens, "miss": stats.prefix_missed_tokens},
        graph_steps=stats.graph_steps,
        graph_searches=stats.graph_searches,
        graph_seconds=stats.graph_seconds,
        graph_bytes=stats.graph_bytes,
        background=stats.background,
        running=stats.running,
        drafts=stats.drafts,
        build=build_info(stats.device),
    )
