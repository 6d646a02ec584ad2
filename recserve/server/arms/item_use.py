"""What experiments need to know about each item route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from recserve.schemas.experiments import Use
from recserve.schemas.items import (
    Envelope,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
)

B = TypeVar("B", bound=RecommendRequest | RankRequest)
A = TypeVar("A", bound=Envelope)


@dataclass(frozen=True)
class ItemUse(Generic[B, A]):
    """One item route.

    Attributes:
        name: Name of the use in experiments.
        path: Path of the route.
        answer: Class of a response.
        empty: Whether a response has no item from a model.
        item_ids: Ids of the items of a response, best first.
    """

    name: Use
    path: str
    answer: type[A]
    empty: Callable[[A], bool]
    item_ids: Callable[[A], list[str]]


def _no_model_items(answer: RecommendResponse) -> bool:
    cold = "cold_start" in answer.degraded
    return not cold and not any(item.source == "model" for item in answer.items)


RECOMMEND = ItemUse[RecommendRequest, RecommendResponse](
    "recommend",
    "/v1/recommend",
    RecommendResponse,
    _no_model_items,
    lambda answer: [item.item_id for item in answer.items],
)
RANK = ItemUse[RankRequest, RankResponse](
    "rank",
    "/v1/rank",
    RankResponse,
    lambda answer: not answer.items,
    lambda answer: [item.item_id for item in answer.items],
)
