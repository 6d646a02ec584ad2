"""Routes of the Open Inference Protocol: metadata and infer for `recommend` and `rank`."""

from __future__ import annotations

from importlib.metadata import version as installed

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.inference import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    ModelReady,
    OutputTensor,
    ServerMetadata,
)
from recserve.schemas.items import (
    RankBatchRequest,
    RankResponse,
)
from recserve.server.app_state import AppState, finished, json_response, outcomes
from recserve.server.routes.paths import add_get
from recserve.server.tensors import (
    INPUTS,
    described_inputs,
    described_outputs,
    ranking_requests,
    ranking_tensors,
    selected,
    slate_requests,
    slate_tensors,
)
from recserve.server.transport.trace import trace_of
from recserve.service import Service
from recserve.service.errors import UnknownModel

BODY = msgspec.json.Decoder(InferRequest)
PLATFORM = "recserve"


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes; the answers are those of /v1/recommend and /v1/rank as tensors."""

    async def server_metadata() -> Response:
        """Return name and version of the server."""
        said = ServerMetadata(name="recserve", version=installed("recserve"), extensions=[])
        return json_response(said)

    add_get(app, "/v2", server_metadata, "server_metadata")

    @app.get("/v2/models/{name}", operation_id="model_metadata")
    async def model_metadata(name: str) -> Response:
        """Return inputs and outputs of a model."""
        service = _serving(app_state.service, name)
        said = ModelMetadata(
            name=name,
            versions=[service.versions()["model_version"]],
            platform=PLATFORM,
            inputs=described_inputs(name),
            outputs=described_outputs(name, _tasks(service)),
        )
        return json_response(said)

    @app.get("/v2/models/{name}/ready", operation_id="model_ready")
    async def model_ready(name: str) -> Response:
        """Report that a model takes requests; 404 if the bundle lacks it, 503 while loading."""
        _serving(app_state.service, name)
        return json_response(ModelReady(name=name, ready=True))

    @app.post("/v2/models/{name}/infer", operation_id="infer")
    async def infer(name: str, request: Request) -> Response:
        """Recommend or rank for up to 256 users, given and returned as tensors."""
        body = await app_state.body(request, BODY)
        service = _serving(app_state.service, name)
        ask = _slates if name == "recommend" else _rankings
        version, tensors = await ask(app_state, service, request, body)
        answer = InferResponse(
            model_name=name,
            model_version=version,
            id=trace_of(request.scope).request_id,
            outputs=selected(tensors, body.outputs),
        )
        return json_response(answer)


# Version of the models, and the outputs.
Answered = tuple[str, list[OutputTensor]]


async def _slates(
    app_state: AppState, service: Service, request: Request, body: InferRequest
) -> Answered:
    requests = slate_requests(body)
    deadline_s = app_state.deadline_s(request, body.parameters.timeout_ms)

    begin = service.begin_recommend_batch
    works = await app_state.begin(begin, request, requests, deadline_s)
    found = await outcomes(request, works, deadline_s)
    answers = [finished(trace_of(request.scope), outcome) for outcome in found]
    return answers[0].model_version, slate_tensors(answers)


async def _rankings(
    app_state: AppState, service: Service, request: Request, body: InferRequest
) -> Answered:
    requests = ranking_requests(body)
    deadline_s = app_state.deadline_s(request, body.parameters.timeout_ms)
    batch = RankBatchRequest(requests=requests)
    works = await app_state.begin(service.begin_rank_batch, request, batch, deadline_s)
    found = await outcomes(request, works, deadline_s)
    answers: list[RankResponse] = [finished(trace_of(request.scope), one) for one in found]
    return answers[0].model_version, ranking_tensors(requests, answers)


def _serving(service: Service, name: str) -> Service:
    """Returns the service if it has the model. Raises UnknownModel."""
    if name not in INPUTS:
        raise UnknownModel(f"expected one of {', '.join(INPUTS)}, got {name[:80]!r}")
    _ = service.recommendations if name == "recommend" else service.rankings
    return service


def _tasks(service: Service) -> list[str]:
    """Returns the tasks of the ranker, or the one score of `likelihood`."""
    parts = service.item_parts
    ranker = None if parts is None else parts.models.ranker
    return ["likelihood"] if ranker is None else list(ranker.config.tasks)
