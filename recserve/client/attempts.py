"""When a request is sent again: deadlines, waiting times, errors. No input or output here."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from recserve.client.operations import Operation
from recserve.schemas.items import ErrorDetail

# The server refuses these before it begins a request, so any request may be sent again.
NOT_BEGUN = ("queue_full", "not_ready", "too_many_connections")
RETRIED = (429, 503)
ADMIN = "/admin/"
# The server ends a late request itself. The client waits this much longer for its error.
GRACE_S = 1.0


class ApiError(RuntimeError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        error: The server's description: message, type, field and code.
        request_id: Id of the request in the server's log; None if the answer has none.
    """

    def __init__(self, status: int, error: ErrorDetail, request_id: str | None) -> None:
        super().__init__(f"{status} {error.code}: {error.message}")
        self.status, self.error, self.request_id = status, error, request_id


class DeadlinePassed(TimeoutError):
    """The server did not answer within the deadline."""


@dataclass(frozen=True)
class ClientOptions:
    """How a client calls the server.

    Attributes:
        api_key: Key of the routes; None sends none.
        admin_key: Key of the routes below `/admin/`; None sends `api_key`.
        deadline_s: Time for an answer, with all attempts.
        text_deadline_s: Time for a text, with all attempts.
        retries: Most further attempts after 429, 503 or a refused connection.
        max_wait_s: Longest wait between two attempts. A longer `Retry-After` ends the attempts.
        connections: Most open connections.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    deadline_s: float = 10.0
    text_deadline_s: float = 600.0
    retries: int = 3
    max_wait_s: float = 5.0
    connections: int = 100

    def __post_init__(self) -> None:
        for name in ("deadline_s", "text_deadline_s", "max_wait_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.retries <= 100:
            raise ValueError(f"retries is {self.retries}; expected 0 to 100")


class Attempts:
    """The attempts at one operation, within one deadline."""

    def __init__(
        self, operation: Operation[Any], options: ClientOptions, deadline_s: float | None
    ) -> None:
        """Starts the clock.

        Args:
            operation: The request to send.
            options: Options of the client.
            deadline_s: Time for the answer; None means that of the options.
        """
        texts = ("/completions", "/rerank", "/generative_scoring")
        usual = options.text_deadline_s if operation.path.endswith(texts) else options.deadline_s
        self._operation, self._options = operation, options
        self._until_s = time.monotonic() + (usual if deadline_s is None else deadline_s)
        self._failures = 0

    def request(self) -> dict[str, Any]:
        """Returns the arguments of httpx for the next attempt. Raises DeadlinePassed."""
        operation, left_s = self._operation, self._left_s()
        headers = {"X-Deadline-Ms": str(max(1, round(left_s * 1e3)))}
        key = self._options.api_key
        if operation.path.startswith(ADMIN):
            key = self._options.admin_key or key
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        if operation.body is not None:
            headers["Content-Type"] = "application/json"
        return {
            "method": operation.method,
            "url": operation.path,
            "headers": headers,
            "content": operation.content(),
            "timeout": left_s + GRACE_S,
        }

    def refused(self, status: int, headers: Mapping[str, str], content: bytes) -> float:
        """Returns the seconds until the next attempt after an error of the server.

        Raises:
            ApiError: If the request is not sent again.
        """
        error = api_error(status, headers, content)
        again = status in RETRIED and (self._operation.repeatable or error.error.code in NOT_BEGUN)
        asked_s = _seconds(headers.get("retry-after"))
        return self._wait_s(asked_s, error if again else None, error)

    def unreachable(self, error: httpx.ConnectError) -> float:
        """Returns the seconds until the next attempt. Raises the error if there is none."""
        return self._wait_s(0.0, error, error)

    def late(self) -> DeadlinePassed:
        """Returns the error of a request without an answer in time."""
        operation = self._operation
        return DeadlinePassed(f"{operation.method} {operation.path}: no answer in time")

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise self.late()
        return left_s

    def _wait_s(self, asked_s: float, again: Exception | None, error: Exception) -> float:
        """Returns a wait that grows with each failure, with jitter; raises the error at the end."""
        self._failures += 1
        spread_s = 0.05 * 2 ** min(self._failures, 10)
        wait_s = asked_s + random.uniform(0, spread_s)
        possible = asked_s <= self._options.max_wait_s and self._failures <= self._options.retries
        if again is None or not possible or time.monotonic() + wait_s >= self._until_s:
            raise error
        return min(wait_s, self._options.max_wait_s)


class AnyError(msgspec.Struct):
    """The body of an error response; below `/v2` the error is a message alone."""

    error: ErrorDetail | str


def api_error(status: int, headers: Mapping[str, str], content: bytes) -> ApiError:
    """Returns the error of an answer; of a proxy's answer, its beginning as the message."""
    error: ErrorDetail | str
    try:
        error = msgspec.json.decode(content, type=AnyError).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = content[:200].decode(errors="replace") or "no body"
    if isinstance(error, str):
        error = ErrorDetail(message=error, type="unknown", param=None, code="unknown")
    return ApiError(status, error, headers.get("x-request-id"))


def _seconds(retry_after: str | None) -> float:
    """Returns the seconds of a Retry-After header; 0 without one or with a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.0


DATA, DONE = "data: ", "[DONE]"


def event_data(line: str) -> str | None:
    """Returns the data of a line of an event stream; None for other lines and for the end."""
    data = line[len(DATA) :] if line.startswith(DATA) else None
    return None if data == DONE else data


def chunk(operation: Operation[Any], data: str) -> Any:
    """Decodes an event of a stream. Raises ApiError if it reports an error."""
    raw = data.encode()
    if raw.startswith(b'{"error"'):
        raise api_error(200, {}, raw)
    return operation.read(raw)
