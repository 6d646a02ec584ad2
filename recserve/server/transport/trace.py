"""State of one HTTP request: its trace, and the body that is still arriving."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.types import Scope

from recserve.schemas.items import REQUEST_ID, InvalidRequest, TimingMs

HEADER = "x-request-id"
_SHAPE = re.compile(REQUEST_ID.pattern or "")
SCOPE_KEY = "recserve.trace"
UPLOAD_KEY = "recserve.upload"


@dataclass
class Trace:
    """request_id: the client's, else drawn. began_s: of time.monotonic().

    strategy, timing_ms: set once a model has answered. failure: label of the failure counter.
    """

    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    began_s: float = field(default_factory=time.monotonic)
    strategy: str = "none"
    timing_ms: TimingMs | None = None
    failure: str | None = None

    def rename(self, request_id: str | None) -> None:
        """Take the id that the client gave, if it gave one.

        Raises InvalidRequest for one that could not stand in a header.
        """
        if request_id is None:
            return
        if not _SHAPE.match(request_id):
            came = f"expected {REQUEST_ID.description}, got {request_id[:40]!r}"
            raise InvalidRequest("X-Request-Id", came)
        self.request_id = request_id

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer carries."""
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if self.timing_ms is not None:
            stages = {
                name: getattr(self.timing_ms, name) for name in self.timing_ms.__struct_fields__
            }
            text = ", ".join(f"{name};dur={value}" for name, value in stages.items())
            headers.append((b"server-timing", text.encode()))
        return headers


def trace_of(scope: Scope) -> Trace:
    """Returns the trace that the gate put into the scope."""
    trace: Trace = scope[SCOPE_KEY]
    return trace


@dataclass
class Upload:
    """error: why the connection has given up the rest of the body; None while it waits for it."""

    error: Exception | None = None


def upload_error(scope: Scope) -> Exception | None:
    """Returns why the body of a request will not be completed; None if it still may be."""
    upload: Upload | None = scope.get(UPLOAD_KEY)
    return None if upload is None else upload.error
