"""Deprecated for one release: requests and responses are in `recserve.schemas.items`."""

from __future__ import annotations

import warnings
from typing import Any

from recserve.schemas import items


def __getattr__(name: str) -> Any:
    try:
        value = getattr(items, name)
    except AttributeError:
        raise AttributeError(f"recserve.messages has no {name!r}") from None
    warnings.warn(
        f"recserve.messages.{name} is recserve.schemas.items.{name} now",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
