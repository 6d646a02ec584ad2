"""Computes a group of slates in one deterministic engine batch.

The last bits of a floating-point sum depend on the requests that share a forward pass. The engine
normally batches the requests that have arrived when it steps. This module therefore submits a group
while the engine is paused between two steps. Batch composition, and so every output byte, then
depends on the requests alone.

For the same reason `auto` means `beam` wherever beam search is available. Outside of batch jobs
`auto` depends on measured response times, and so on the clock.
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
    """Returns a Generator's `recommend` for a service.

    Args:
        service: Service that receives no other requests while the job runs.
    """

    def recommend(bodies: Sequence[RecommendRequest]) -> list[RecommendResponse | Exception]:
        with service.runtime.engine.held():
            begun = [_begin(service, body) for body in bodies]
        return [one if isinstance(one, Exception) else _outcome(one) for one in begun]

    return recommend


def _begin(service: Service, body: RecommendRequest) -> Pending[RecommendResponse] | Exception:
    """Submits a request and returns its pending response, or the error that rejected it."""
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
