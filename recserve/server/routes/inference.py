"""Routes of the Open Inference Protocol: metadata and infer for `recommend` and `rank`."""

from __future__ import annotations

from importlib.metadata import version as installed

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
from recserve.server.app_state import AppState, gather, json_response, trace_answer
from recserve.server.binary_tensors import HEADER, check_outputs, read_request, write_response
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

PLATFORM = "recserve"
EXTENSIONS = ["binary_tensor_data"]


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes; the answers are those of /v1/recommend and /v1/rank as tensors."""

    async def server_metadata() -> Response:
        """Return name, version and extensions of the server."""
        version = installed("recserve")
        said = ServerMetadata(name="recserve", version=version, extensions=EXTENSIONS)
        return json_response(said)

    async def model_metadata(name: str, request: Request) -> Response:
        """Return inputs and outputs of a model."""
        service = _serving(app_state.service, name, request)
        said = ModelMetadata(
            name=name,
            versions=[service.versions()["model_version"]],
            platform=PLATFORM,
            inputs=described_inputs(name),
            outputs=described_outputs(name, _tasks(service)),
        )
        return json_response(said)

    async def model_ready(name: str, request: Request) -> Response:
        """Report that a model takes requests; 404 if the bundle lacks it, 503 while loading."""
        _serving(app_state.service, name, request)
        return json_response(ModelReady(name=name, ready=True))

    async def infer(name: str, request: Request) -> Response:
        """Recommend or rank for up to 256 users, given and returned as tensors."""
        raw = await app_state.raw_body(request)
        body = read_request(raw, request.headers.getlist(HEADER))
        trace = trace_of(request.scope)
        trace.rename(body.request_id)
        wanted = body.outputs or []
        check_outputs(wanted)
        service = _serving(app_state.service, name, request)
        ask = _slates if name == "recommend" else _rankings
        version, tensors = await ask(app_state, service, request, body)
        answer = InferResponse(
            model_name=name,
            model_version=version,
            id=trace.request_id,
            outputs=selected(tensors, wanted),
        )
        return write_response(answer, body.parameters, wanted)

    add_get(app, "/v2", server_metadata, "server_metadata")
    model = "/v2/models/{name}"
    add_get(app, model, model_metadata, "model_metadata")
    add_get(app, f"{model}/ready", model_ready, "model_ready")
    app.add_api_route(f"{model}/infer", infer, methods=["POST"], operation_id="infer")
    # The same routes with a version, which must be the one that is served.
    model += "/versions/{version}"
    add_get(app, model, model_metadata)
    add_get(app, f"{model}/ready", model_ready)
    app.add_api_route(f"{model}/infer", infer, methods=["POST"], include_in_schema=False)


# Version of the models, and the outputs.
Answered = tuple[str, list[OutputTensor]]


async def _slates(
    app_state: AppState, service: Service, request: Request, body: InferRequest
) -> Answered:
    requests = slate_requests(body)
    deadline_s = app_state.deadline_s(request, body.parameters.least_timeout_ms)

    begin = service.recommender.begin_batch
    works = await app_state.begin(begin, request, requests, deadline_s)
    found = await gather(request, works, deadline_s)
    answers = [trace_answer(trace_of(request.scope), outcome) for outcome in found]
    return answers[0].model_version, slate_tensors(answers)


async def _rankings(
    app_state: AppState, service: Service, request: Request, body: InferRequest
) -> Answered:
    requests = ranking_requests(body)
    deadline_s = app_state.deadline_s(request, body.parameters.least_timeout_ms)
    batch = RankBatchRequest(requests=requests)
    works = await app_state.begin(service.ranker.begin_batch, request, batch, deadline_s)
    found = await gather(request, works, deadline_s)
    answers: list[RankResponse] = [trace_answer(trace_of(request.scope), one) for one in found]
    return answers[0].model_version, ranking_tensors(requests, answers)


def _serving(service: Service, name: str, request: Request) -> Service:
    """Returns the service if it has the model and the version of the path. Raises UnknownModel."""
    if name not in INPUTS:
        raise UnknownModel(f"expected one of {', '.join(INPUTS)}, got {name[:80]!r}")
    _ = service.recommender if name == "recommend" else service.ranker
    version = request.path_params.get("version")
    if version is not None and version != (served := service.versions()["model_version"]):
        raise UnknownModel(f"expected version {served} of {name}, got {version[:80]!r}")
    return service


def _tasks(service: Service) -> list[str]:
    """Returns the tasks of the scorer that `auto` selects."""
    scorer = next(iter(service.ranker.scorers.values()))
    return list(scorer.tasks)
