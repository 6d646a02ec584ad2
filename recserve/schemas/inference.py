"""Requests and responses of the Open Inference Protocol (`/v2`), in its JSON form."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from recserve.schemas.items import Name, RequestId, TimeoutMs

MAX_TENSORS = 8
MAX_DATA = 1 << 20

Extent = Annotated[int, Meta(ge=0, le=MAX_DATA)]
Shape = Annotated[list[Extent], Meta(min_length=1, max_length=2)]


class InferTensor(Struct, frozen=True, kw_only=True):
    """An input tensor. Fields of the protocol that are not listed here are ignored.

    Attributes:
        shape: One or two dimensions; the first one is the number of users.
        datatype: `BYTES` for text, or `INT64`.
        data: Values, row by row, flat or nested by row.
    """

    name: Name
    shape: Shape
    datatype: Annotated[str, Meta(max_length=16)]
    data: Annotated[list[Any], Meta(max_length=MAX_DATA)]


class InferParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of an infer request. None means the default of the route under `/v1`.

    Attributes:
        strategy: Strategy of `recommend`.
        beam_width: Beam width of `recommend`.
        exclude_seen: False allows items of the history in a slate.
        scorer: Scorer of `rank`.
        timeout_ms: Deadline of the whole request.
    """

    strategy: Name | None = None
    beam_width: int | None = None
    exclude_seen: bool = True
    scorer: Name | None = None
    timeout_ms: TimeoutMs | None = None


class RequestedOutput(Struct, frozen=True, kw_only=True):
    """An output that the response shall have."""

    name: Name


class InferRequest(Struct, frozen=True, kw_only=True):
    """POST /v2/models/{name}/infer.

    Attributes:
        id: Id of the request, echoed in the response.
        inputs: Input tensors, each with the same number of rows.
        outputs: Outputs to return; None returns all.
    """

    inputs: Annotated[list[InferTensor], Meta(min_length=1, max_length=MAX_TENSORS)]
    id: RequestId | None = None
    parameters: InferParameters = InferParameters()
    outputs: Annotated[list[RequestedOutput], Meta(max_length=64)] | None = None

    @property
    def request_id(self) -> str | None:
        """The id under its name in the other routes."""
        return self.id


class OutputTensor(Struct, frozen=True, kw_only=True):
    """An output tensor. `data` is flat, row by row. A missing score is null."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class InferResponse(Struct, frozen=True, kw_only=True):
    """Response of /v2/models/{name}/infer. `model_version` is that of the bundle's models."""

    model_name: str
    model_version: str
    id: str
    outputs: list[OutputTensor]


class TensorMetadata(Struct, frozen=True, kw_only=True):
    """Name, type and shape of a tensor; -1 is any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Struct, frozen=True, kw_only=True):
    """Response of GET /v2/models/{name}."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(Struct, frozen=True, kw_only=True):
    """Response of GET /v2."""

    name: str
    version: str
    extensions: list[str]


class ModelReady(Struct, frozen=True, kw_only=True):
    """Response of GET /v2/models/{name}/ready."""

    name: str
    ready: bool
