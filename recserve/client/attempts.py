"""When a request is sent again, and what is read of its answer: no input or output here."""

from __future__ import annotations

import datetime
import math
import random
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from recserve.client.deadline import Deadline
from recserve.client.operations import Request
from recserve.schemas.items import (
    ErrorDetail,
    HideItemResponse,
    ItemsResponse,
    RollbackResponse,
)

A = TypeVar("A")
# The server refuses these before it begins a request, so any request may be sent again.
NOT_BEGUN = ("queue_full", "quota_exceeded", "not_ready", "too_many_connections")
RETRIED = (429, 503)
MIN_VERSION_HEADER = "X-Recserve-Min-Catalog-Version"
# The server ends a late request itself. It gets this much less time, so that its error arrives.
RETURN_SHARE, RETURN_S = 0.1, 1.0
MAX_DEADLINE_S = 999_999.0  # the header has at most nine digits of milliseconds
INFLATED_AT_ONCE = 1 << 16


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
    """The server's answer was not complete within the deadline."""


class AnswerTooLarge(RuntimeError):
    """The answer, or one event of a stream, is longer than the client reads."""


@dataclass(frozen=True)
class ClientOptions:
    """How a client calls the server.

    Attributes:
        api_key: Key of the routes; None sends none.
        admin_key: Key of the routes below `/admin/`; None sends `api_key`.
        deadline_s: Time for an answer, with all attempts.
        text_deadline_s: The same for operations of the language model: texts, scores, embeddings.
        retries: Most further attempts after 429, 503 or a refused connection.
        max_wait_s: Longest wait between two attempts. A longer `Retry-After` ends the attempts.
        connections: Most open connections.
        max_answer_bytes: Longest answer, decompressed. In a stream, it limits each event.
        sees_own_changes: Later requests of this client name the newest catalogue version that its
            own changes of items have made, so that every server of several answers from it.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    deadline_s: float = 10.0
    text_deadline_s: float = 600.0
    retries: int = 3
    max_wait_s: float = 5.0
    connections: int = 100
    max_answer_bytes: int = 128 << 20
    sees_own_changes: bool = False

    def __post_init__(self) -> None:
        for name in ("deadline_s", "text_deadline_s", "max_wait_s"):
            if not 0 < getattr(self, name) <= MAX_DEADLINE_S:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; "
                    f"expected above 0 and at most {MAX_DEADLINE_S:.0f}"
                )
        if not 0 <= self.retries <= 100:
            raise ValueError(f"retries is {self.retries}; expected 0 to 100")
        if self.max_answer_bytes < 1:
            raise ValueError(f"max_answer_bytes is {self.max_answer_bytes}; expected 1 or more")


class OwnChanges:
    """The newest version of the catalogue that the changes of a client have made.

    Attributes:
        newest: Its name; None before a change.
    """

    def __init__(self) -> None:
        self.newest: str | None = None
        self._order = (0, 0)

    @staticmethod
    def of(options: ClientOptions) -> OwnChanges | None:
        """Returns what a client remembers of its changes; None if it does not."""
        return OwnChanges() if options.sees_own_changes else None

    def add(self, answer: object) -> None:
        """Remembers the version of an answer if it is that of a change."""
        if isinstance(answer, ItemsResponse | HideItemResponse | RollbackResponse):
            parts = answer.catalog_version.split(".")[1:]
            numbers = [int(part) for part in parts if part.isdecimal()]
            order = (numbers[-2] if numbers[1:] else 0, numbers[-1] if numbers else 0)
            if self.newest is None or order > self._order:
                self.newest, self._order = answer.catalog_version, order


class Attempts(Generic[A]):
    """The attempts at one request, within one deadline."""

    def __init__(
        self,
        request: Request[A],
        options: ClientOptions,
        deadline_s: float | None,
        changes: OwnChanges | None = None,
    ) -> None:
        """Starts the clock.

        Args:
            request: The request to send.
            options: Options of the client.
            deadline_s: Time for the answer; None means that of the options.
            changes: What the client has changed; None does not remember it.

        Raises:
            ValueError: If the deadline is no number or longer than a header can say.
        """
        if deadline_s is None:
            text = request.operation.text
            deadline_s = options.text_deadline_s if text else options.deadline_s
        if not deadline_s <= MAX_DEADLINE_S:
            raise ValueError(f"deadline_s is {deadline_s}; expected at most {MAX_DEADLINE_S:.0f}")
        self._request, self._options, self._changes = request, options, changes
        self._until_s = time.monotonic() + deadline_s
        self._failures = 0

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of httpx for the next attempt. Raises DeadlinePassed."""
        request, left_s = self._request, self.left_s()
        told_s = left_s - min(left_s * RETURN_SHARE, RETURN_S)
        headers = {
            "X-Deadline-Ms": str(max(1, math.floor(told_s * 1e3))),
            "Accept-Encoding": "gzip",
        }
        key = self._options.api_key
        if request.operation.admin:
            key = self._options.admin_key or key
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        if self._changes is not None and self._changes.newest is not None:
            headers[MIN_VERSION_HEADER] = self._changes.newest
        if request.content is not None:
            headers["Content-Type"] = "application/json"
        return {
            "method": request.operation.method,
            "url": request.path,
            "headers": headers,
            "content": request.content,
            "timeout": Deadline(self._until_s),
        }

    def reader(self, response: httpx.Response) -> AnswerReader[A]:
        """Returns what reads the answer of an attempt."""
        return AnswerReader(self._request, response, self._options.max_answer_bytes)

    def delay_after(self, response: httpx.Response, content: bytes | bytearray) -> float:
        """Returns the seconds until the next attempt after an error of the server.

        Raises:
            ApiError: If the request is not sent again.
        """
        error = api_error(response.status_code, response.headers, content)
        may_repeat = self._request.repeatable or error.error.code in NOT_BEGUN
        again = error if response.status_code in RETRIED and may_repeat else None
        return self._wait_s(wait_asked_s(response.headers.get("retry-after")), again, error)

    def unreachable(self, error: httpx.ConnectError) -> float:
        """Returns the seconds until the next attempt. Raises the error if there is none."""
        return self._wait_s(0.0, error, error)

    def late(self) -> DeadlinePassed:
        """Returns the error of a request without a complete answer in time."""
        operation = self._request.operation
        return DeadlinePassed(f"{operation.method} {self._request.path}: no answer in time")

    def left_s(self) -> float:
        """Returns the time that is left. Raises DeadlinePassed if there is none."""
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


class AnswerReader(Generic[A]):
    """Decodes an answer while its bytes arrive, and limits its size.

    Attributes:
        content: The decompressed bytes that have arrived; of a stream, the unfinished line.
        whole: The answer of a transport without a network, which has been read; else None.
    """

    def __init__(self, request: Request[A], response: httpx.Response, max_bytes: int) -> None:
        """Reads nothing yet.

        Raises:
            httpx.DecodingError: If the answer has an encoding that the client did not ask for.
        """
        encoding = response.headers.get("content-encoding", "").strip().lower()
        self.whole = response.content if response.is_stream_consumed else None
        self._request, self._max_bytes = request, max_bytes
        self._success = response.is_success
        self._inflater = None
        if encoding not in ("", "identity") and self.whole is None:
            if encoding not in ("gzip", "x-gzip", "deflate"):
                raise httpx.DecodingError(
                    f"{self._name}: Content-Encoding is {encoding[:64]!r}; "
                    "expected gzip, deflate or none",
                    request=response.request,
                )
            # 32 recognises the headers of gzip and zlib.
            self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
        self.content = bytearray()

    def add(self, part: bytes) -> Iterator[A]:
        """Takes the next bytes. Yields the chunks of a stream that are complete.

        Raises:
            AnswerTooLarge: If the answer, or an event of a stream, exceeds the limit.
            ApiError: If an event of a stream reports an error.
        """
        for piece in self._inflate(part):
            self.content += piece
            if self._request.chunks and self._success and b"\n" in piece:
                *lines, self.content = self.content.split(b"\n")
                for line in lines:
                    if (data := event_data(line)) is not None:
                        self._limit(data)
                        yield self._chunk(data)
            self._limit(self.content)

    def end(self) -> Iterator[A]:
        """Yields the answer, unless it is a stream or an error."""
        if self._success and not self._request.chunks:
            yield self._request.read(self.content)

    @property
    def _name(self) -> str:
        return f"{self._request.operation.method} {self._request.path}"

    def _limit(self, content: bytearray) -> None:
        if len(content) > self._max_bytes:
            raise AnswerTooLarge(
                f"{self._name}: the answer has more than {self._max_bytes} bytes "
                "(ClientOptions.max_answer_bytes)"
            )

    def _inflate(self, part: bytes) -> Iterator[bytes]:
        """Yields the decompressed bytes in pieces, so that a small part cannot fill the memory."""
        if self._inflater is None:
            yield part
            return
        piece = b""
        while part or len(piece) == INFLATED_AT_ONCE:
            try:
                piece = self._inflater.decompress(part, INFLATED_AT_ONCE)
            except zlib.error as error:
                raise httpx.DecodingError(f"{self._name}: {error}") from None
            if self._inflater.unused_data:
                raise httpx.DecodingError(f"{self._name}: bytes after the compressed answer")
            part = self._inflater.unconsumed_tail
            yield piece

    def _chunk(self, data: bytearray) -> A:
        if data.startswith(b'{"error"'):
            raise api_error(200, {}, data)
        return self._request.read(data)


class AnyError(msgspec.Struct):
    """The body of an error response; below `/v2` the error is a message alone."""

    error: ErrorDetail | str


def api_error(status: int, headers: Mapping[str, str], content: bytes | bytearray) -> ApiError:
    """Returns the error of an answer; of a proxy's answer, its beginning as the message."""
    error: ErrorDetail | str
    try:
        error = msgspec.json.decode(content, type=AnyError).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = content[:200].decode(errors="replace") or "no body"
    if isinstance(error, str):
        error = ErrorDetail(message=error, type="unknown", param=None, code="unknown")
    return ApiError(status, error, headers.get("x-request-id"))


def wait_asked_s(retry_after: str | None) -> float:
    """Returns the seconds of a Retry-After header, a number or a date; 0 if it is neither."""
    if retry_after is None:
        return 0.0
    if re.fullmatch("[0-9]+", retry_after):
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except (ValueError, TypeError, OverflowError, IndexError):
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())


DATA, DONE = b"data:", b"[DONE]"


def event_data(line: bytearray) -> bytearray | None:
    """Returns the data of a line of an event stream; None for other lines and for the end."""
    if not line.startswith(DATA):
        return None
    data = line[len(DATA) :].removeprefix(b" ").removesuffix(b"\r")
    return None if data == DONE else data
