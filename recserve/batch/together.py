"""Slates of a group of users, computed in one batch whatever the clock does.

Sums in floating point depend in their last bits on what shares a forward. The engine takes what has
arrived when it steps, so a group is handed over while it is held between two steps: then the batch,
and with it every byte of the answers, is a function of the requests alone. For the same reason
`auto` is `beam` where there is beam search: whether a draft pays is learned from the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from recserve.batch.generate import Recommend
from recserve.schemas.items import RecommendRequest, RecommendResponse
from recserve.service import Service
from recserve.service.pending import Pending
from recserve.service.recommend.auto_strategy import AUTO, BEAM


def together(service: Service) -> Recommend:
    """A Generator's `recommend` over this service; nobody else may use the service meanwhile."""

    def recommend(bodies: Sequence[RecommendRequest]) -> list[RecommendResponse | Exception]:
        with service.runtime.engine.held():
            begun = [_begin(service, body) for body in bodies]
        return [one if isinstance(one, Exception) else _outcome(one) for one in begun]

    return recommend


def _begin(service: Service, body: RecommendRequest) -> Pending[RecommendResponse] | Exception:
    if body.strategy == AUTO and BEAM in service.runtime.engine.strategies:
        body = structs.replace(body, strategy=BEAM)
    try:
        return service.begin_recommend(body)
    except ValueError as error:
        return error


def _outcome(work: Pending[RecommendResponse]) -> RecommendResponse | Exception:
    try:
        return work.wait()
    except Exception as error:
        return error
