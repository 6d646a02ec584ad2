"""Routes GET /v1/experiments and POST /admin/experiments/{name}:stop and :start."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from recserve.server.app_state import AppState, json_response


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that show, stop and start experiments."""

    @app.get("/v1/experiments", operation_id="experiments")
    def experiments() -> Response:  # not async: its first call imports scipy, on a thread
        """Return the state of all experiments and of their arms."""
        return json_response(app_state.experiments.described())

    @app.post("/admin/experiments/{name}:stop", operation_id="stop_experiment")
    async def stop_experiment(name: str) -> Response:
        """Stop an experiment: every request gets the control. Needs an admin key."""
        experiment = app_state.experiments.find(name)
        experiment.stop()
        return json_response(experiment.described())

    @app.post("/admin/experiments/{name}:start", operation_id="start_experiment")
    async def start_experiment(name: str) -> Response:
        """Start a stopped or fallen-back experiment again. Needs an admin key."""
        experiment = app_state.experiments.find(name)
        experiment.start()
        return json_response(experiment.described())
