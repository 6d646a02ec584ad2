"""Handlers of GET /v1/experiments and POST /admin/experiments/{name}:stop and :start."""

from __future__ import annotations

from recserve.schemas.api import Api
from recserve.schemas.experiments import ExperimentsResponse, ExperimentStatus
from recserve.server.context import RequestContext
from recserve.server.routing import handles


@handles(Api.experiments)
def experiments(context: RequestContext) -> ExperimentsResponse:
    """Answers with all experiments. Its first call imports scipy, so it runs on a thread."""
    return context.state.experiments.described()


@handles(Api.stop_experiment)
async def stop_experiment(context: RequestContext, name: str) -> ExperimentStatus:
    """Stops an experiment."""
    experiment = context.state.experiments.find(name)
    experiment.stop()
    return experiment.described()


@handles(Api.start_experiment)
async def start_experiment(context: RequestContext, name: str) -> ExperimentStatus:
    """Starts an experiment again."""
    experiment = context.state.experiments.find(name)
    experiment.start()
    return experiment.described()
