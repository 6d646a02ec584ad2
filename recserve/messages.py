"""Deprecated for one release: requests and responses are in `recserve.schemas.items`."""

from __future__ import annotations

import warnings
from typing import Any

from recserve.schemas import items

_RENAMED = {
    "ErrorAnswer": "ErrorResponse",
    "HiddenAnswer": "HideItemResponse",
    "ItemAnswer": "ItemResponse",
    "ItemBody": "ItemInput",
    "ItemsAnswer": "ItemsResponse",
    "ItemsBody": "ItemsRequest",
    "RankAnswer": "RankResponse",
    "RankBatchAnswer": "RankBatchResponse",
    "RankBatchBody": "RankBatchRequest",
    "RankBody": "RankRequest",
    "RecommendAnswer": "RecommendResponse",
    "RecommendBody": "RecommendRequest",
    "RollbackAnswer": "RollbackResponse",
    "RollbackBody": "RollbackRequest",
}


def __getattr__(name: str) -> Any:
    new = _RENAMED.get(name, name)
    try:
        value = getattr(items, new)
    except AttributeError:
        raise AttributeError(f"recserve.messages has no {name!r}") from None
    warnings.warn(
        f"recserve.messages.{name} is recserve.schemas.items.{new} now",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
