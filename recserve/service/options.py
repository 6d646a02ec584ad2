"""Options of `Service.open`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recserve.engine.engine_config import EngineConfig
from recserve.kernels.int8 import WeightFormat
from recserve.service.model_loader import DTypeName
from recserve.service.text.loader import LoadedText

# Keywords of `Service.open` in the previous release, grouped by the class that has them now.
OLD_ENGINE_KEYWORDS = ("max_queue", "kv_bytes", "kv_dtype", "load_aware", "graphs", "invariant")
OLD_KEYWORDS = ("signing_key", "journal", "dtype", "text")
IGNORED_KEYWORD = "warm_drafts"  # events with `warm` now compute only the prefix


@dataclass(frozen=True)
class ServiceOptions:
    """How a service is opened.

    Attributes:
        engine: Sizes and modes of the engine.
        dtype: Element type of the recommender; "auto" is the fastest that fits. None means
            float32 on a CPU and "auto" on CUDA.
        signing_key: Key of attribution tokens; None draws a random key. Tokens of a random key are
            not valid in another process.
        journal: Folder of item changes; None means a folder next to the bundle.
        text: A language model that the same engine serves; None for none.
        history_ttl_s: Age in seconds at which stored events are deleted; None keeps them forever.
            `?ttl_s=SECONDS` at the end of the store's URL does the same.
        weights: Format of the recommender's decoder weights; None means the element type.
        history_timeout_ms: Time that a request waits for its stored history, where the store is on
            a network. Then it continues without it. None waits as long as the store takes to
            fail.
    """

    engine: EngineConfig = EngineConfig()
    dtype: DTypeName | None = None
    signing_key: bytes | None = None
    journal: Path | None = None
    text: LoadedText | None = None
    history_ttl_s: float | None = None
    weights: WeightFormat | None = None
    history_timeout_ms: int | None = None


def with_old_keywords(options: ServiceOptions, old: dict[str, Any]) -> ServiceOptions:
    """Returns the options with deprecated keywords of `Service.open` applied to them.

    Args:
        options: The options to start from.
        old: Keyword arguments as the previous release accepted them.

    Raises:
        TypeError: If a keyword is unknown.
    """
    for name in old:
        if name == IGNORED_KEYWORD:
            message = f"Service.open({name}=...) is deprecated and has no effect"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            continue
        if name not in OLD_ENGINE_KEYWORDS + OLD_KEYWORDS:
            raise TypeError(f"Service.open() got an unexpected keyword argument {name!r}")
        owner = "engine=EngineConfig" if name in OLD_ENGINE_KEYWORDS else ""
        new = f"{owner}({name}=...)" if owner else f"{name}=..."
        warnings.warn(
            f"Service.open({name}=...) is deprecated; use options=ServiceOptions({new})",
            DeprecationWarning,
            stacklevel=3,
        )
    engine = {name: value for name, value in old.items() if name in OLD_ENGINE_KEYWORDS}
    own = {name: value for name, value in old.items() if name in OLD_KEYWORDS}
    return replace(options, engine=replace(options.engine, **engine), **own)
