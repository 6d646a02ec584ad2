"""OpenTelemetry traces of requests, made from their recorded times after the response.

Only this file imports opentelemetry, and only if traces are on (extra `otel`).
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version as installed
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from recserve.schemas.items import TimingMs
from recserve.server.trace import Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_QUEUED = 2048  # ended requests that wait for the thread; further ones get no trace
PARENT_HEADERS = ("traceparent", "tracestate")
STAGES = ("features", "queue", "prefill", "draft", "verify")


@dataclass(frozen=True)
class _Ended:
    """An ended request.

    Attributes:
        trace: Its trace.
        method: HTTP method.
        route: Path template.
        parent: Headers that name the caller's span.
        ended_s: time.monotonic() value at the end.
        epoch_ns: What to add to monotonic nanoseconds for those since 1970.
    """

    trace: Trace
    method: str
    route: str
    parent: dict[str, str]
    ended_s: float
    epoch_ns: int


class Tracing:
    """Makes spans on a thread of its own, so that no request waits for them.

    Attributes:
        num_dropped: Requests without a trace because the queue was full.
    """

    def __init__(self, provider: TracerProvider) -> None:
        """Starts the thread.

        Args:
            provider: Samples and exports the spans.
        """
        self.num_dropped = 0
        self._provider = provider
        self._tracer = provider.get_tracer("recserve", installed("recserve"))
        self._ended: queue.Queue[_Ended | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def record(self, scope: Scope, trace: Trace) -> None:
        """Takes an ended request; it returns at once."""
        if not trace.counted:
            return
        headers, now = Headers(scope=scope), time.monotonic()
        parent = {name: headers[name] for name in PARENT_HEADERS if name in headers}
        epoch_ns = time.time_ns() - int(now * 1e9)
        ended = _Ended(trace, scope["method"], trace.route, parent, now, epoch_ns)
        try:
            self._ended.put_nowait(ended)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Exports what is queued and stops the thread."""
        self._ended.put(None)
        self._thread.join()
        self._provider.shutdown()

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            self._export(ended)

    def _export(self, ended: _Ended) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        trace = ended.trace
        span = self._tracer.start_span(
            f"{ended.method} {ended.route}",
            TraceContextTextMapPropagator().extract(ended.parent),
            SpanKind.SERVER,
            {
                "http.request.method": ended.method,
                "http.route": ended.route,
                "http.response.status_code": trace.status,
                "recserve.request_id": trace.request_id,
                "recserve.strategy": trace.strategy,
            },
            start_time=int(trace.began_s * 1e9) + ended.epoch_ns,
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for name, (began_s, end_s) in stages_of(trace, ended.ended_s).items():
                began_ns = int(began_s * 1e9) + ended.epoch_ns
                stage = self._tracer.start_span(name, inside, start_time=began_ns)
                stage.end(int(end_s * 1e9) + ended.epoch_ns)
            if trace.status >= 500:
                span.set_status(Status(StatusCode.ERROR, trace.failure or ""))
        span.end(int(ended.ended_s * 1e9) + ended.epoch_ns)


def stages_of(trace: Trace, ended_s: float) -> dict[str, tuple[float, float]]:
    """Returns start and end of each stage, as time.monotonic() values.

    The service reports how long each stage took in total. Rounds of drafting and verifying
    alternate; here each stage is one interval, one after another.

    Args:
        trace: Trace of a request; without an answer of a model it has no stages.
        ended_s: End of the request.
    """
    timing: TimingMs | None = trace.timing_ms
    if timing is None or trace.answered_s is None:
        return {}
    begun_s = max(trace.began_s, trace.answered_s - timing.total / 1e3)
    found = {"admit": (trace.began_s, begun_s)}
    for name in STAGES:
        end_s = min(begun_s + getattr(timing, name) / 1e3, trace.answered_s)
        found[name] = begun_s, end_s
        begun_s = end_s
    found["respond"] = trace.answered_s, max(trace.answered_s, ended_s)
    return found


def open_tracing(endpoint: str, ratio: float) -> Tracing:
    """Returns traces that are sent to an OTLP receiver over HTTP.

    Args:
        endpoint: URL of the receiver. `/v1/traces` is added to a URL without a path.
        ratio: Share of the requests that are traced, unless the caller has decided.

    Raises:
        ModuleNotFoundError: If the extra `otel` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    bare = urlsplit(endpoint).path in ("", "/")
    url = f"{endpoint.rstrip('/')}/v1/traces" if bare else endpoint
    return Tracing(provider_of(OTLPSpanExporter(endpoint=url), ratio))


def provider_of(exporter: SpanExporter, ratio: float) -> TracerProvider:
    """Returns a provider that samples a share of the requests and exports in batches.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES replace attributes of recserve's own.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    about = {"service.name": "recserve", "service.version": installed("recserve")}
    sampler = ParentBased(TraceIdRatioBased(ratio))
    resource = Resource.create(about).merge(OTELResourceDetector().detect())
    provider = TracerProvider(sampler=sampler, resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
