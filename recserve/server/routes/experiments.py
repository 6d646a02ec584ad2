"""Routes GET /v1/experiments and POST /admin/experiments/{name}:stop and :start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.responses import Response

from recserve.schemas.experiments import ExperimentsResponse, UnknownExperiment
from recserve.server.app_state import AppState, json_response

if TYPE_CHECKING:
    from recserve.experiments.serving.experiment import Experiment


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that show, stop and start experiments."""

    @app.get("/v1/experiments", operation_id="experiments")
    def experiments() -> Response:  # not async: its first call imports scipy, on a thread
        """Return the state of all experiments and of their arms."""
        found = app_state.experiments
        none = ExperimentsResponse(experiments=[])
        return json_response(none if found is None else found.described())

    @app.post("/admin/experiments/{name}:stop", operation_id="stop_experiment")
    async def stop_experiment(name: str) -> Response:
        """Stop an experiment: every request gets the control. Needs an admin key."""
        experiment = _find(app_state, name)
        experiment.stop()
        return json_response(experiment.described())

    @app.post("/admin/experiments/{name}:start", operation_id="start_experiment")
    async def start_experiment(name: str) -> Response:
        """Start a stopped or fallen-back experiment again. Needs an admin key."""
        experiment = _find(app_state, name)
        experiment.start()
        return json_response(experiment.described())


def _find(app_state: AppState, name: str) -> Experiment:
    """Returns an experiment by name. Raises UnknownExperiment."""
    if app_state.experiments is None:
        raise UnknownExperiment(f"experiments of this server: none; got {name[:80]!r}")
    return app_state.experiments.find(name)
