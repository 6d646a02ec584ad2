"""recserve: a generative recommendation server.

The public names are imported on first use:

    from recserve import RecommendRequest, Service
    with Service.open("shop.bundle") as service:
        answer = service.recommend(RecommendRequest(history=["item000007"], k=10))
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recserve.bundle.building import BuildOptions, build_bundle
    from recserve.bundle.bundle import Bundle
    from recserve.engine.build import EngineModels, build_engine
    from recserve.engine.engine import Engine
    from recserve.engine.engine_config import EngineConfig
    from recserve.schemas.events import EventInput, EventsRequest
    from recserve.schemas.items import (
        Candidate,
        Diversity,
        Exclusions,
        InvalidRequest,
        ItemsRequest,
        RankRequest,
        RankResponse,
        RecommendRequest,
        RecommendResponse,
        SimilarRequest,
        UserRef,
    )
    from recserve.service import Service, ServiceOptions

    __version__: str

__all__ = [
    "BuildOptions",
    "Bundle",
    "Candidate",
    "Diversity",
    "Engine",
    "EngineConfig",
    "EngineModels",
    "EventInput",
    "EventsRequest",
    "Exclusions",
    "InvalidRequest",
    "ItemsRequest",
    "RankRequest",
    "RankResponse",
    "RecommendRequest",
    "RecommendResponse",
    "Service",
    "ServiceOptions",
    "SimilarRequest",
    "UserRef",
    "__version__",
    "build_bundle",
    "build_engine",
]

_HOMES = {
    "BuildOptions": "recserve.bundle.building",
    "Bundle": "recserve.bundle.bundle",
    "Candidate": "recserve.schemas.items",
    "Diversity": "recserve.schemas.items",
    "Engine": "recserve.engine.engine",
    "EngineConfig": "recserve.engine.engine_config",
    "EngineModels": "recserve.engine.build",
    "EventInput": "recserve.schemas.events",
    "EventsRequest": "recserve.schemas.events",
    "Exclusions": "recserve.schemas.items",
    "InvalidRequest": "recserve.schemas.items",
    "ItemsRequest": "recserve.schemas.items",
    "RankRequest": "recserve.schemas.items",
    "RankResponse": "recserve.schemas.items",
    "RecommendRequest": "recserve.schemas.items",
    "RecommendResponse": "recserve.schemas.items",
    "Service": "recserve.service",
    "ServiceOptions": "recserve.service",
    "SimilarRequest": "recserve.schemas.items",
    "UserRef": "recserve.schemas.items",
    "build_bundle": "recserve.bundle.building",
    "build_engine": "recserve.engine.build",
}

# torch reads this when it is imported. It places large tensors on huge pages, from which weights
# stream faster.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"recserve has no {name!r}; public names: {', '.join(__all__)}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from recserve.extras import describe_missing

        if (message := describe_missing(error, f"recserve.{name}")) is None:
            raise
        raise ModuleNotFoundError(message, name=error.name) from None


def _version() -> str:
    # Imported here, because importlib.metadata takes a fifth of the time of `recserve --help`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("recserve")
    except PackageNotFoundError:  # runs from a checkout that is not installed
        return "0+unknown"
