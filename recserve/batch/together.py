"""Computes a group of requests in one deterministic engine batch.

The last bits of a floating-point sum depend on the requests that share a forward pass. The engine
normally batches the requests that have arrived when it steps. This module therefore submits a group
while the engine is paused between two steps. Batch composition, and so every output byte, then
depends on the requests alone.

For the same reason `auto` means what validation chose for the bundle, or else `beam` where it is
available. Outside of batch jobs
`auto` depends on measured response times, and so on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs

from recserve.batch.generate import Recommend
from recserve.core.finite import NotFinite
from recserve.engine.engine import Engine
from recserve.schemas.items import RecommendRequest, RecommendResponse
from recserve.search.strategy import strategy_classes
from recserve.service import Service
from recserve.service.auto_strategy import AUTO, BEAM
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
    engine = service.engine

    def begin(body: RecommendRequest) -> Callable[[], RecommendResponse]:
        chosen = service.recommender.auto_setting(body)
        if chosen is not None:
            body = structs.replace(body, strategy=chosen.strategy)
            if strategy_classes()[chosen.strategy].dense_weight == "used":
                body = structs.replace(body, dense_weight=chosen.dense_weight)
        elif body.strategy == AUTO and BEAM in engine.selectable:
            body = structs.replace(body, strategy=BEAM)
        return service.recommender.begin(body).wait

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
