"""Slates for tests of the slate log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recserve.schemas.items import RecommendedItem, RecommendResponse, TimingMs
from recserve.service.attribution import Signer
from recserve.service.slate_log.slate_log import SlateLog, SlateLogSettings

SIGNER = Signer(b"k" * 16)
TIMING = TimingMs(queue=0.0, features=0.0, prefill=0.0, draft=0.0, verify=0.0, total=0.1)


def slate(number: int, user: str | None = "u1", k: int = 3) -> RecommendResponse:
    """Returns a slate of k items for a user."""
    items = [
        RecommendedItem(item_id=f"i{n}", score=-float(n), rank=n + 1, source="model")
        for n in range(k)
    ]
    return RecommendResponse(
        request_id=f"r{number}",
        items=items,
        strategy="beam",
        exact=True,
        rounds=1,
        model_version="m1",
        catalog_version="c1",
        degraded=[],
        attribution_token=SIGNER.token(
            f"r{number}", user, "m1", "c1", [item.item_id for item in items]
        ),
        timing_ms=TIMING,
    )


def opened(folder: Path, **settings: Any) -> SlateLog:
    """Opens a log that writes only when it must."""
    return SlateLog(SlateLogSettings(folder, **{"rotate_s": 3600.0, **settings}))
