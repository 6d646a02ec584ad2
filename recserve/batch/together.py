"""Computes a group of requests in one deterministic engine batch.

The last bits of a floating-point sum depend on the requests that share a forward pass. The engine
normally batches the requests that have arrived when it steps. This module therefore submits a group
while the engine is paused between two steps. Batch composition, and so every output byte, then
depends on the requests alone.

For the same reason the strategy of `auto` does not follow from the clock here
(`RecommendService.without_clock`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from recserve.batch.generate import Recommend
from recserve.core.finite import NotFinite
from recserve.engine.engine import Engine
from recserve.schemas.items import RecommendRequest, RecommendResponse
from recserve.service import Service
from recserve.service.errors import UnknownModel


class NoAnswer(ValueError):
    """The models have no valid result for this request."""


B = TypeVar("B")
A = TypeVar("A")


def together(service: Service) -> Recommend:
    """Returns a Generator's `recommend` for a service.

    Args:
        service: Service that receives no other requests while the job runs.
    """
    engine, recommender = service.engine, service.recommender

    def begin(body: RecommendRequest) -> Callable[[], RecommendResponse]:
        return recommender.begin(recommender.without_clock(body)).wait

    def recommend(bodies: Sequence[RecommendRequest]) -> list[RecommendResponse | Exception]:
        return submit_together(engine, begin, bodies)

    return recommend


def reset(engine: Engine) -> None:
    """Empties the prefix caches and orders the free pages as at the start.

    The bits of later results then do not depend on earlier requests.
    """
    with engine.held():
        for scheduler in engine.schedulers.values():
            scheduler.kv.prefixes.clear()
            scheduler.kv.allocator.sort_free()


def submit_together(
    engine: Engine, begin: Callable[[B], Callable[[], A]], bodies: Sequence[B]
) -> list[A | Exception]:
    """Computes requests that enter the engine between the same two steps.

    Args:
        engine: The engine that `begin` submits to.
        begin: Submits a request and returns a function that waits for its answer.
        bodies: The requests.

    Returns:
        An answer or an error per request. A ValueError concerns that request alone.
    """
    with engine.held():
        begun = [_submit(begin, body) for body in bodies]
    return [one if isinstance(one, Exception) else _outcome(one) for one in begun]


def _submit(begin: Callable[[B], Callable[[], A]], body: B) -> Callable[[], A] | Exception:
    """Submits a request; returns the error if it is rejected."""
    try:
        return begin(body)
    except (ValueError, UnknownModel) as error:
        return error


def _outcome(wait: Callable[[], A]) -> A | Exception:
    try:
        return wait()
    except NotFinite as error:
        return NoAnswer(str(error))
    except Exception as error:
        return error
