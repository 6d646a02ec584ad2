"""recserve: a generative recommendation server.

Public names, loaded when first used:

    from recserve import RecommendBody, Service
    with Service.open("shop.bundle") as service:
        answer = service.recommend(RecommendBody(history=["item000007"], k=10))
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recserve.bundle.building import BuildOptions, build_bundle
    from recserve.bundle.bundle import Bundle
    from recserve.engine.build import EngineModels, build_engine
    from recserve.engine.build import ModelEngine as Engine
    from recserve.engine.engine_config import EngineConfig
    from recserve.schemas.items import RankBody, RecommendBody
    from recserve.service import Service, ServiceOptions

__all__ = [
    "BuildOptions",
    "Bundle",
    "Engine",
    "EngineConfig",
    "EngineModels",
    "RankBody",
    "RecommendBody",
    "Service",
    "ServiceOptions",
    "__version__",
    "build_bundle",
    "build_engine",
]

_HOMES = {
    "BuildOptions": "recserve.bundle.building",
    "Bundle": "recserve.bundle.bundle",
    "Engine": "recserve.engine.build:ModelEngine",
    "EngineConfig": "recserve.engine.engine_config",
    "EngineModels": "recserve.engine.build",
    "RankBody": "recserve.schemas.items",
    "RecommendBody": "recserve.schemas.items",
    "Service": "recserve.service",
    "ServiceOptions": "recserve.service",
    "build_bundle": "recserve.bundle.building",
    "build_engine": "recserve.engine.build",
}

# Read by torch when it is loaded: large tensors on huge pages, of which weights stream faster.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

try:
    __version__ = version("recserve")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"recserve has no {name!r}; public names: {', '.join(__all__)}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)
