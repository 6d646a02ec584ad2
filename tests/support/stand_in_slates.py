"""Slates of a stand-in for the models, for tests of batch jobs."""

import time

from recserve.batch.generate import Defaults, Generator
from recserve.schemas.items import InvalidRequest, RecommendedItem, RecommendResponse, TimingMs
from tests.support.in_process import InProcess


def respond(body):
    """A slate that names its user, or a rejection of the users called bad."""
    if body.user.id.startswith("bad"):
        return InvalidRequest("strategy", "is not there")
    return RecommendResponse(
        request_id="r",
        strategy=body.strategy,
        exact=True,
        rounds=1,
        model_version="m1",
        catalog_version="c1",
        degraded=[],
        attribution_token="",
        timing_ms=TimingMs(),
        items=[
            RecommendedItem(item_id=f"{body.user.id}-{n}", score=-n / 7, rank=n, source="model")
            for n in range(1, body.k + 1)
        ],
    )


def runner(stop_after=None, k=2, in_flight=2, pause_s=0.0):
    """A runner that answers everything, or fails after a number of requests.

    Args:
        stop_after: Number of requests after which it fails; None never fails.
        k: Items per slate.
        in_flight: Requests per group.
        pause_s: Time of a group, so that a process can be killed between any two steps.
    """
    left = [stop_after]

    def recommend(bodies):
        time.sleep(pause_s)
        if left[0] is not None:
            left[0] -= len(bodies)
            if left[0] < 0:
                raise RuntimeError("device lost")
        return [respond(body) for body in bodies]

    return InProcess(Generator(recommend, Defaults(k=k), in_flight=in_flight))
