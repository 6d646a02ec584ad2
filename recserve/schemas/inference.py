"""Requests and responses of the Open Inference Protocol (`/v2`) with Triton's parameters."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.schemas.items import MAX_TIMEOUT_MS, Name, OnDeadline, RequestId, TimeoutMs

MAX_TENSORS = 8
MAX_DATA = 1 << 20

JsonText = Annotated[str, Meta(max_length=65_536)]
Extent = Annotated[int, Meta(ge=0, le=MAX_DATA)]
Shape = Annotated[list[Extent], Meta(min_length=1, max_length=2)]


# Bytes of a tensor after the JSON part of a body. The body itself has a limit, too.
BinarySize = Annotated[int, Meta(ge=0, le=1 << 40)]


class InputParameters(Struct, frozen=True, kw_only=True):
    """Parameters of an input tensor. Parameters that are not listed here are ignored.

    Attributes:
        binary_data_size: Bytes of the tensor after the JSON part; None if `data` has the values.
        shared_memory_region: Not supported.
    """

    binary_data_size: BinarySize | None = None
    shared_memory_region: str | None = None


class InferTensor(Struct, frozen=True, kw_only=True):
    """An input tensor. Fields of the protocol that are not listed here are ignored.

    Attributes:
        shape: One or two dimensions; the first one is the number of users.
        datatype: `BYTES` for text, or `INT64`.
        data: Values, row by row, flat or nested by row. Absent in the binary form.
    """

    name: Name
    shape: Shape
    datatype: Annotated[str, Meta(max_length=16)]
    data: Annotated[list[Any], Meta(max_length=MAX_DATA)] | UnsetType = UNSET
    parameters: InputParameters = InputParameters()


class InferParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of an infer request. None means the default of the route under `/v1`.

    Attributes:
        strategy: Strategy of `recommend`.
        beam_width: Beam width of `recommend`.
        exclude_seen: False allows items of the history in a slate.
        diversity: Caps and quotas of `recommend`, as JSON text.
        exclude_shown: Leaves out of `recommend` what a user was shown, as JSON text.
        discount_shown: Lowers in `recommend` what a user was shown, as JSON text.
        scoring: Scoring rule of `recommend`, as JSON text.
        on_deadline: What answers a `recommend` whose deadline passes: `error`, `popular`, `latest`.
        scorer: Scorer of `rank`.
        timeout_ms: Deadline of the whole request.
        timeout: The same in microseconds, as Triton's clients send it; 0 sets none.
        binary_data_output: Whether outputs follow the JSON part as bytes by default.
        priority: Accepted and of no effect: all requests have the same priority.
        sequence_id: Accepted and of no effect, like `sequence_start` and `sequence_end`: no model
            has a state that a sequence of requests could change.
    """

    strategy: Name | None = None
    beam_width: int | None = None
    exclude_seen: bool = True
    diversity: JsonText | None = None
    exclude_shown: JsonText | None = None
    discount_shown: JsonText | None = None
    scoring: JsonText | None = None
    on_deadline: OnDeadline = "error"
    scorer: Name | None = None
    timeout_ms: TimeoutMs | None = None
    timeout: Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS * 1000)] | None = None
    binary_data_output: bool = False
    priority: Annotated[int, Meta(ge=0)] = 0
    sequence_id: Annotated[int, Meta(ge=0)] | Annotated[str, Meta(max_length=256)] = 0
    sequence_start: bool = False
    sequence_end: bool = False

    @property
    def least_timeout_ms(self) -> float | None:
        """The sooner one of `timeout_ms` and `timeout`; None without both."""
        limits = [limit for limit in (self.timeout_ms, (self.timeout or 0) / 1e3) if limit]
        return min(limits, default=None)


class OutputParameters(Struct, frozen=True, kw_only=True):
    """Parameters of a requested output. Parameters that are not listed here are ignored.

    Attributes:
        binary_data: Whether the tensor follows the JSON part as bytes; None asks the request.
        classification: Not supported; 0 asks for none.
        shared_memory_region: Not supported.
    """

    binary_data: bool | None = None
    classification: int | None = None
    shared_memory_region: str | None = None


class RequestedOutput(Struct, frozen=True, kw_only=True):
    """An output that the response shall have. `fields.NAME` is a column of the catalogue."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    parameters: OutputParameters = OutputParameters()


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


class BinaryOutput(Struct, frozen=True, kw_only=True):
    """Parameters of an output tensor in the binary form.

    Attributes:
        binary_data_size: Bytes of the tensor after the JSON part, in the order of the outputs.
    """

    binary_data_size: int


class OutputTensor(Struct, frozen=True, kw_only=True):
    """An output tensor.

    Attributes:
        data: Values, flat, row by row. A missing score is null. Absent in the binary form.
        parameters: Present in the binary form only.
    """

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | UnsetType = UNSET
    parameters: BinaryOutput | UnsetType = UNSET


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


class TensorConfig(Struct, frozen=True, kw_only=True):
    """A tensor as Triton's model configuration describes it; -1 is any size."""

    name: str
    data_type: str
    dims: list[int]


class ParameterText(Struct, frozen=True, kw_only=True):
    """Value of a parameter of a model configuration."""

    string_value: str


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Response of GET /v2/models/{name}/config, in Triton's form.

    Attributes:
        max_batch_size: 0, which means that `dims` are whole shapes, rows included.
        parameters: `max_rows` is the largest number of rows.
    """

    name: str
    platform: str
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]
    parameters: dict[str, ParameterText]


class Durations(Struct, frozen=True, kw_only=True):
    """Number of requests, and the sum of their times."""

    count: int
    ns: int


class InferenceStats(Struct, frozen=True, kw_only=True):
    """Requests that were answered, and those that were refused or failed."""

    success: Durations
    fail: Durations


class ModelStatistics(Struct, frozen=True, kw_only=True):
    """What a process has answered since it started.

    Attributes:
        last_inference: Time of the latest answer, in milliseconds since 1970; 0 before the first.
        inference_count: Rows that were answered.
        execution_count: Requests that were answered.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStats


class Statistics(Struct, frozen=True, kw_only=True):
    """Response of GET /v2/models/{name}/stats and /v2/models/stats, in Triton's form."""

    model_stats: list[ModelStatistics]


class InferError(Struct, frozen=True, kw_only=True):
    """Error response of every path below `/v2` but `/v2/rerank`: the message alone."""

    error: str


class ServerMetadata(Struct, frozen=True, kw_only=True):
    """Response of GET /v2."""

    name: str
    version: str
    extensions: list[str]


class ModelReady(Struct, frozen=True, kw_only=True):
    """Response of GET /v2/models/{name}/ready."""

    name: str
    ready: bool
