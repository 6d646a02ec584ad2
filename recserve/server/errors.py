"""Maps exception classes to HTTP errors, and formats every error response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from recserve.core.errors import DeadlineExceeded, EngineStopped, QueueFull
from recserve.engine.scheduler import RequestTooLarge
from recserve.features.catalog.catalog_log import JournalError, LogUnavailable
from recserve.features.history.history import (
    CorruptHistory,
    ListingUnsupported,
    StoreUnavailable,
)
from recserve.schemas.api import Operation
from recserve.schemas.experiments import ExperimentNotSaved, UnknownExperiment
from recserve.schemas.inference import InferError
from recserve.schemas.items import (
    ErrorDetail,
    ErrorResponse,
    InvalidRequest,
)
from recserve.server.body_decoder import MalformedBody
from recserve.server.trace import Trace
from recserve.service.errors import (
    INVALID_STATUS,
    REFUSALS,
    CatalogBehind,
    CatalogConflict,
    CatalogLost,
    Refusal,
    ServiceClosed,
    nearest,
)

Header = tuple[bytes, bytes]


class BodyTooLarge(ValueError):
    """The body is longer than the server reads."""


class EncodedBody(ValueError):
    """The body is compressed, which this server does not read."""


class MalformedRequest(ValueError):
    """The request is not HTTP/1.1."""


class HeadersTooLarge(ValueError):
    """The URL and headers exceed a limit."""


class RequestTimeout(TimeoutError):
    """The client took too long to send its request."""


class TooManyConnections(RuntimeError):
    """The server has reached its limit of connections."""


class Unauthorized(PermissionError):
    """The request has no valid API key."""


class QuotaExceeded(RuntimeError):
    """The key has sent too many requests.

    Attributes:
        retry_after_s: Seconds until it may send one again.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AdminDisabled(PermissionError):
    """The server has no admin keys, or lacks the setting that the admin route needs."""


class CrossSite(PermissionError):
    """A page of another site made the browser send this request."""


class NotReady(RuntimeError):
    """The server is loading, is draining or has failed."""


class NotShared(RuntimeError):
    """The change would reach one of several servers only."""


class FleetSilent(RuntimeError):
    """The Redis in which the servers of a fleet report does not answer."""


class SwapConflict(RuntimeError):
    """The bundle cannot be replaced now: a replacement runs, or there is no previous bundle."""


class UnknownBundle(LookupError):
    """The folder of bundles has no bundle of this name."""


class ClientGone(ConnectionError):
    """The client closed the connection before its answer was ready."""


@dataclass(frozen=True)
class Row(Refusal):
    """The HTTP form of an exception class.

    Attributes:
        reason: Label of the failure counter.
        message: Text for the client; None uses the exception's own message.
    """

    reason: str
    message: str | None = None


INTERNAL = Row(500, "server_error", "internal", "internal", "internal error")
TABLE: dict[type[Exception], Row] = {
    **{
        kind: Row(one.status, one.type, one.code, "not_found" if one.status == 404 else "invalid")
        for kind, one in REFUSALS.items()
    },
    MalformedBody: Row(400, "invalid_request_error", "malformed_body", "invalid"),
    MalformedRequest: Row(400, "invalid_request_error", "malformed_request", "invalid"),
    Unauthorized: Row(401, "authentication_error", "invalid_api_key", "unauthorized"),
    CrossSite: Row(403, "permission_error", "cross_site", "unauthorized"),
    AdminDisabled: Row(403, "permission_error", "admin_disabled", "unauthorized"),
    UnknownExperiment: Row(404, "not_found_error", "unknown_experiment", "not_found"),
    UnknownBundle: Row(404, "not_found_error", "unknown_bundle", "not_found"),
    RequestTimeout: Row(408, "timeout_error", "request_timeout", "request_timeout"),
    SwapConflict: Row(409, "conflict_error", "bundle_conflict", "invalid"),
    CatalogLost: Row(409, "conflict_error", "catalog_version_lost", "invalid"),
    BodyTooLarge: Row(413, "invalid_request_error", "body_too_large", "invalid"),
    EncodedBody: Row(415, "invalid_request_error", "unsupported_encoding", "invalid"),
    QueueFull: Row(429, "overloaded_error", "queue_full", "queue_full"),
    QuotaExceeded: Row(429, "rate_limit_error", "quota_exceeded", "quota"),
    HeadersTooLarge: Row(431, "invalid_request_error", "headers_too_large", "invalid"),
    ClientGone: Row(499, "client_error", "client_gone", "cancelled"),
    CorruptHistory: Row(
        500,
        "server_error",
        "corrupt_history",
        "features_down",
        "the stored history of this user is damaged, or another version of recserve wrote it: "
        "`recserve history show` says which. Deleting the user starts again",
    ),
    ListingUnsupported: Row(501, "unsupported_error", "listing_unsupported", "invalid"),
    EngineStopped: Row(503, "unavailable_error", "not_ready", "not_ready"),
    NotReady: Row(503, "unavailable_error", "not_ready", "not_ready"),
    TooManyConnections: Row(
        503, "overloaded_error", "too_many_connections", "too_many_connections"
    ),
    ServiceClosed: Row(
        503, "unavailable_error", "not_ready", "not_ready", "the server is shutting down"
    ),
    StoreUnavailable: Row(
        503,
        "unavailable_error",
        "history_unavailable",
        "features_down",
        "the history store does not answer",
    ),
    JournalError: Row(
        503,
        "unavailable_error",
        "items_read_only",
        "features_down",
        "items cannot be changed now: another process changes them, or the disk refuses writes",
    ),
    LogUnavailable: Row(
        503,
        "unavailable_error",
        "catalog_unavailable",
        "features_down",
        "items cannot be changed now: the log of changes in Redis does not answer. The change may "
        "be stored; it is safe to send it again",
    ),
    FleetSilent: Row(503, "unavailable_error", "catalog_unavailable", "features_down"),
    NotShared: Row(503, "unavailable_error", "items_read_only", "features_down"),
    CatalogBehind: Row(503, "unavailable_error", "catalog_behind", "not_ready"),
    CatalogConflict: Row(503, "unavailable_error", "catalog_conflict", "not_ready"),
    ExperimentNotSaved: Row(503, "unavailable_error", "experiment_not_saved", "features_down"),
    DeadlineExceeded: Row(504, "timeout_error", "deadline_exceeded", "deadline"),
}
TABLE[RequestTooLarge] = replace(
    TABLE[RequestTooLarge],
    message="the request needs more memory than the server has for one request; reduce its size",
)
# Errors of the framework's routing: unknown path, wrong method.
ROUTING: dict[int, Row] = {
    404: Row(
        404,
        "not_found_error",
        "unknown_route",
        "not_found",
        "no such route; GET /openapi.json lists all routes",
    ),
    405: Row(405, "invalid_request_error", "method_not_allowed", "not_found", "wrong method"),
}
ROWS = (*TABLE.values(), *ROUTING.values(), INTERNAL)
REASONS = tuple(sorted({row.reason for row in ROWS}))
CODES = tuple(sorted({row.code for row in ROWS}))


def row_of(error: BaseException, operation: Operation[Any, Any] | None = None) -> Row:
    """Returns the row of an exception's nearest class in the table; INTERNAL if there is none.

    Args:
        error: The exception.
        operation: What the request asked for, which decides the status of invalid fields.
    """
    if isinstance(error, HTTPException):
        return ROUTING.get(error.status_code, INTERNAL)
    row = nearest(error, TABLE) or INTERNAL
    if row.status == INVALID_STATUS and operation is not None:
        return replace(row, status=operation.invalid_status)
    return row


def error_answer(error: BaseException) -> ErrorResponse:
    """Returns the response body of an error. It contains no internal names."""
    row = row_of(error)
    message = row.message or str(error) or row.code.replace("_", " ")
    if isinstance(error, HTTPException) and error.headers and "Allow" in error.headers:
        message += f"; this route takes {error.headers['Allow']}"
    param = error.param if isinstance(error, InvalidRequest) else None
    return ErrorResponse(
        error=ErrorDetail(message=message, type=row.type, param=param, code=row.code)
    )


def is_inference(path: str) -> bool:
    """Whether errors on a path have the form of the Open Inference Protocol: a message alone.

    Triton's clients read all of `/v2` so. `/v2/rerank` is Cohere's.
    """
    return path == "/v2" or path.startswith("/v2/") and not path.startswith("/v2/rerank")


def error_response(
    error: BaseException, path: str, operation: Operation[Any, Any] | None = None
) -> Response:
    """Returns the response of an error, with the headers that its status requires.

    Args:
        error: An exception; TABLE maps it to a status.
        path: Path of the request, which decides the form of the body; empty if it is unknown.
        operation: See `row_of`.
    """
    row = row_of(error, operation)
    headers = {}
    if isinstance(error, QueueFull | QuotaExceeded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif row.status == 415:
        headers["Accept-Encoding"] = "identity"
    elif row.status == 503:
        headers["Retry-After"] = "1"
    elif row.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="recserve: any name, a key as password"'
    elif isinstance(error, HTTPException) and error.headers and "Allow" in error.headers:
        headers["Allow"] = error.headers["Allow"]
    answer = error_answer(error)
    message = InferError(error=answer.error.message) if is_inference(path) else answer
    body = msgspec.json.encode(message)
    return Response(body, row.status, headers, "application/json")


def refusal_bytes(error: Exception, path: str, default_headers: Sequence[Header]) -> bytes:
    """Returns the complete HTTP response of an error, as the application would write it.

    Args:
        error: An exception; TABLE maps it to a status.
        path: Path of the request; empty if it is unknown.
        default_headers: Headers that the server adds to every response, such as `date`.
    """
    response = error_response(error, path)
    status = HTTPStatus(response.status_code)
    headers: list[Header] = [
        *default_headers,
        *response.raw_headers,
        *Trace().headers(),
        (b"connection", b"close"),
    ]
    lines = [b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode())]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)
