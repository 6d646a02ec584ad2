"""Handlers of GET /v1/experiments and POST /admin/experiments/{name}:stop and :start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recserve.schemas.api import Api
from recserve.schemas.experiments import (
    ExperimentsResponse,
    ExperimentStatus,
    UnknownExperiment,
)
from recserve.server.context import RequestContext
from recserve.server.routing import handles

if TYPE_CHECKING:
    from recserve.experiments.experiment import Experiment


@handles(Api.experiments)
def experiments(context: RequestContext) -> ExperimentsResponse:
    """Answers with all experiments. Its first call imports scipy, so it runs on a thread."""
    arms = context.state.arms
    return ExperimentsResponse(experiments=[]) if arms is None else arms.experiments.describe()


@handles(Api.stop_experiment)
def stop_experiment(context: RequestContext, name: str) -> ExperimentStatus:
    """Stops an experiment. Its first call may import scipy, so it runs on a thread."""
    experiment = _find(context, name)
    experiment.stop()
    return experiment.describe()


@handles(Api.start_experiment)
def start_experiment(context: RequestContext, name: str) -> ExperimentStatus:
    """Starts an experiment again, on a thread as well."""
    experiment = _find(context, name)
    experiment.start()
    return experiment.describe()


def _find(context: RequestContext, name: str) -> Experiment:
    """Returns an experiment by name. Raises UnknownExperiment."""
    arms = context.state.arms
    if arms is None:
        raise UnknownExperiment(f"experiments of this server: none; got {name[:80]!r}")
    return arms.experiments.find(name)
