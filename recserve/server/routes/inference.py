"""Handlers of the Open Inference Protocol: metadata and infer for `recommend` and `rank`."""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version as installed
from math import prod

from starlette.responses import Response

from recserve.schemas.api import Api
from recserve.schemas.inference import (
    InferRequest,
    InferResponse,
    ModelConfig,
    ModelMetadata,
    ModelReady,
    OutputTensor,
    ParameterText,
    ServerMetadata,
    Statistics,
    TensorConfig,
    TensorMetadata,
)
from recserve.schemas.items import (
    MAX_BATCH,
    RankBatchRequest,
    RankResponse,
)
from recserve.server.binary_tensors import HEADER, check_outputs, read_request, write_response
from recserve.server.context import RequestContext
from recserve.server.inference_counts import InferenceCounts
from recserve.server.routing import handles
from recserve.server.tensors import (
    INPUTS,
    describe_inputs,
    describe_outputs,
    ranking_requests,
    ranking_tensors,
    select_outputs,
    slate_requests,
    slate_tensors,
)
from recserve.server.threads import LARGE_BYTES, LARGE_IDS, LARGE_VALUES, is_large
from recserve.service import Service
from recserve.service.errors import UnknownModel

PLATFORM = "recserve"
EXTENSIONS = ["binary_tensor_data"]
CONFIG_TYPES = {"BYTES": "STRING"}  # Triton's configurations name other types as tensors do


@handles(Api.server_metadata)
async def server_metadata(context: RequestContext) -> ServerMetadata:
    """Answers without the service."""
    version = installed("recserve")
    return ServerMetadata(name="recserve", version=version, extensions=EXTENSIONS)


@handles(Api.model_metadata)
async def model_metadata(context: RequestContext, name: str) -> ModelMetadata:
    """Answers with inputs and outputs of a model."""
    service = _serving(context, name)
    return ModelMetadata(
        name=name,
        versions=[service.versions()["model_version"]],
        platform=PLATFORM,
        inputs=describe_inputs(name),
        outputs=describe_outputs(name, _tasks(service)),
    )


@handles(Api.model_ready)
async def model_ready(context: RequestContext, name: str) -> ModelReady:
    """Answers if the bundle has the model."""
    _serving(context, name)
    return ModelReady(name=name, ready=True)


@handles(Api.model_config)
async def model_config(context: RequestContext, name: str) -> ModelConfig:
    """Answers with the configuration of a model."""
    service = _serving(context, name)
    return ModelConfig(
        name=name,
        platform=PLATFORM,
        max_batch_size=0,
        input=_describe_tensors(describe_inputs(name)),
        output=_describe_tensors(describe_outputs(name, _tasks(service))),
        parameters={"max_rows": ParameterText(string_value=str(MAX_BATCH))},
    )


@handles(Api.model_statistics)
async def model_statistics(context: RequestContext, name: str) -> Statistics:
    """Answers with the counts of a model."""
    version = _serving(context, name).versions()["model_version"]
    found = context.state.inferences.get((name, version), InferenceCounts())
    return Statistics(model_stats=[found.describe(name, version)])


@handles(Api.all_statistics)
async def all_statistics(context: RequestContext) -> Statistics:
    """Answers with the counts of all models."""
    version = context.service.versions()["model_version"]
    counts = sorted(context.state.inferences.items())
    return Statistics(
        model_stats=[c.describe(name, of) for (name, of), c in counts if of == version]
    )


async def _read_tensors(context: RequestContext) -> InferRequest:
    """Reads the body of `infer`, JSON with binary data behind it; a long one on a thread."""
    raw = await context.raw_body()
    lengths = context.request.headers.getlist(HEADER)
    call = partial(read_request, raw, lengths)
    body = await context.compute(call, len(raw) > LARGE_BYTES)
    context.trace.rename(body.request_id)
    return body


@handles(Api.infer, read=_read_tensors)
async def infer(context: RequestContext, name: str, body: InferRequest) -> Response:
    """Answers like /v1/recommend or /v1/rank, with tensors."""
    wanted = body.outputs or []
    check_outputs(wanted)
    service = _serving(context, name)
    ask = _slates if name == "recommend" else _rankings
    began_ns, rows = time.monotonic_ns(), 0
    try:
        version, tensors = await ask(context, body)
        rows = tensors[0].shape[0]
    finally:
        key = name, service.versions()["model_version"]
        context.state.inferences.setdefault(key, InferenceCounts()).count(began_ns, rows)
    answer = InferResponse(
        model_name=name,
        model_version=version,
        id=context.trace.request_id,
        outputs=select_outputs(tensors, wanted),
    )
    write = partial(write_response, answer, body.parameters, wanted)
    return await context.compute(write, sum(prod(one.shape) for one in tensors) > LARGE_VALUES)


# Version of the models, and the outputs.
Answered = tuple[str, list[OutputTensor]]


def _is_long(body: InferRequest) -> bool:
    """Returns whether the tensors have so many values that a thread reads them."""
    return sum(prod(one.shape) for one in body.inputs) > LARGE_IDS


async def _slates(context: RequestContext, body: InferRequest) -> Answered:
    requests = await context.compute(partial(slate_requests, body), _is_long(body))
    deadline_s = context.deadline_s(body.parameters.least_timeout_ms)
    service, request_id, client = context.service, context.trace.request_id, context.client
    submit = partial(service.recommender.begin_all, requests, request_id, deadline_s, client)
    found = await context.answer_all(service.recommender, requests, submit, deadline_s)
    answers = [context.record(outcome) for outcome in found]
    tracked = not context.untracked
    shown = [service.show(*pair, tracked) for pair in zip(requests, answers, strict=True)]
    write = partial(slate_tensors, requests, shown)
    tensors = await context.compute(write, is_large(requests))
    return answers[0].model_version, tensors


async def _rankings(context: RequestContext, body: InferRequest) -> Answered:
    read = partial(ranking_requests, body)
    requests, candidates = await context.compute(read, _is_long(body))
    deadline_s = context.deadline_s(body.parameters.least_timeout_ms)
    batch = RankBatchRequest(requests=requests)
    ranker, request_id = context.service.ranker, context.trace.request_id
    submit = partial(ranker.begin_each, batch, request_id, deadline_s, context.client)
    found = await context.answer_all(ranker, requests, submit, deadline_s)
    answers: list[RankResponse] = [context.record(one) for one in found]
    write = partial(ranking_tensors, requests, answers, candidates)
    return answers[0].model_version, await context.compute(write, is_large(batch))


def _serving(context: RequestContext, name: str) -> Service:
    """Returns the service if it has the model and the version of the path. Raises UnknownModel."""
    service = context.service
    if name not in INPUTS:
        raise UnknownModel(f"expected one of {', '.join(INPUTS)}, got {name[:80]!r}")
    _ = service.recommender if name == "recommend" else service.ranker
    version = context.parameters.get("version")
    if version is not None and version != (served := service.versions()["model_version"]):
        raise UnknownModel(f"expected version {served} of {name}, got {version[:80]!r}")
    return service


def _describe_tensors(tensors: list[TensorMetadata]) -> list[TensorConfig]:
    """Returns tensors as a model configuration describes them."""
    return [
        TensorConfig(
            name=one.name,
            data_type=f"TYPE_{CONFIG_TYPES.get(one.datatype, one.datatype)}",
            dims=one.shape,
        )
        for one in tensors
    ]


def _tasks(service: Service) -> list[str]:
    """Returns the tasks of the scorer that `auto` selects."""
    scorer = next(iter(service.ranker.scorers.values()))
    return list(scorer.tasks)
