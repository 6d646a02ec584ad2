"""What a request leaves in logs, metrics and headers, and what its connection knows of it."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Scope

from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.items import REQUEST_ID, InvalidRequest, TimingMs

HEADER = "x-request-id"
EXPERIMENT_HEADER = b"x-recserve-experiment"
_SHAPE = re.compile(REQUEST_ID.pattern or "")
UPLOAD_KEY = "recserve.upload"


def random_id() -> str:
    """Returns a random UUID; ids are no secrets.

    `uuid.uuid4` asks the system and gives up Python's lock meanwhile. The event loop would then
    wait for the engine's thread, 5 ms and more for each request.
    """
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@dataclass
class Trace:
    """Facts about a request that are logged and counted.

    Attributes:
        request_id: The client's id, or a random one.
        began_s: time.monotonic() value at the start.
        strategy: Strategy of the answer; "none" until a model has answered.
        timing_ms: Times of the stages; None until a model has answered.
        failure: Label of the failure counter; None unless the request failed.
        error_code: Code of the error; empty unless the request failed.
        status: HTTP status of the response; 0 before it starts.
        answered_s: time.monotonic() value at the answer of the service; None without one.
        experiment: Experiment and arm of the request; None outside experiments.
        degraded: Codes of `degraded` of all answers in the response.
        route: Path template, which has no ids; "other" if no route matched.
        counted: Whether the operation counts for quotas and has a span.
    """

    request_id: str = field(default_factory=random_id)
    began_s: float = field(default_factory=time.monotonic)
    strategy: str = "none"
    timing_ms: TimingMs | None = None
    failure: str | None = None
    error_code: str = ""
    status: int = 0
    answered_s: float | None = None
    experiment: ExperimentLabel | None = None
    degraded: list[str] = field(default_factory=list)
    route: str = "other"
    counted: bool = True

    @property
    def arm(self) -> str:
        """Label of metrics: the arm whose latency the request shows, or `none`."""
        label = self.experiment
        alone = label is not None and label.mode in ("split", "shadow") and label.reason is None
        return label.header if label is not None and alone and label.arm else "none"

    def rename(self, request_id: str | None) -> None:
        """Uses the client's id.

        Args:
            request_id: The id; None changes nothing.

        Raises:
            InvalidRequest: If the id is not valid as a header value.
        """
        if request_id is None:
            return
        if not _SHAPE.match(request_id):
            message = f"expected {REQUEST_ID.description}, got {request_id[:40]!r}"
            raise InvalidRequest("X-Request-Id", message)
        self.request_id = request_id

    def record_answer(self, timing_ms: TimingMs | None, strategy: str = "none") -> None:
        """Records the answer of a model: its times and its strategy."""
        self.timing_ms, self.strategy = timing_ms, strategy
        self.answered_s = time.monotonic()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of every response."""
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if self.experiment is not None:
            headers.append((EXPERIMENT_HEADER, self.experiment.header.encode()))
        if self.timing_ms is not None:
            stages = {
                name: getattr(self.timing_ms, name) for name in self.timing_ms.__struct_fields__
            }
            text = ", ".join(f"{name};dur={value}" for name, value in stages.items())
            headers.append((b"server-timing", text.encode()))
        return headers


Recorder = Callable[[Scope, Trace], None]


@dataclass
class Upload:
    """A request as its connection sees it.

    Attributes:
        arrived_s: time.monotonic() value at its first bytes; None if they came with others.
        num_ahead: Requests that came earlier and wait to be parsed, if they fill the queue; else 0.
        error: Why the connection refuses the rest of the body; None while it accepts it.
        last: True if the request is complete and the connection holds no bytes of another one.
    """

    arrived_s: float | None = None
    num_ahead: int = 0
    error: Exception | None = None
    last: bool = False


def upload_of(scope: Scope) -> Upload:
    """Returns the upload of a request; an empty one if another server holds the connection."""
    upload: Upload = scope.get(UPLOAD_KEY) or Upload()
    return upload
