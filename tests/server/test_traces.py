"""Spans of requests: stages, parents, sampling, and the OTLP receiver that gets them."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version as installed

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from recserve.schemas.items import TimingMs
from recserve.server.telemetry.traces import Tracing, provider_of, stages_of
from recserve.server.trace import Trace
from tests.support.live_catalogues import opened
from tests.support.live_server import live

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["admit", "features", "queue", "prefill", "draft", "verify", "respond"]


def answered(status: int = 200) -> Trace:
    timing = TimingMs(queue=1.0, features=0.5, prefill=2.0, draft=0.25, verify=4.0, total=8.0)
    trace = Trace(request_id="r1", began_s=100.0, strategy="beam", status=status)
    trace.timing_ms, trace.answered_s = timing, 100.010
    return trace


def scope(path: str = "/v1/recommend", **headers: str) -> dict:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "method": "POST", "headers": raw}


def spans_of(*requests, ratio: float = 1.0):
    exporter = InMemorySpanExporter()
    tracing = Tracing(provider_of(exporter, ratio))
    for of, trace in requests:
        tracing.record(of, trace)
    tracing.close()
    return exporter.get_finished_spans()


def test_stages_follow_each_other():
    found = stages_of(answered(), 100.012)
    assert list(found) == STAGES
    assert found["admit"] == (100.0, pytest.approx(100.002))
    assert found["verify"] == (pytest.approx(100.00575), pytest.approx(100.00975))
    assert found["respond"] == (100.010, 100.012)
    assert stages_of(Trace(), 1.0) == {}


def test_a_request_becomes_a_span_with_its_stages():
    *stages, request = spans_of((scope(), answered()))
    assert [span.name for span in stages] == STAGES
    assert all(span.parent.span_id == request.context.span_id for span in stages)
    assert request.kind is SpanKind.SERVER and request.parent is None
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["recserve.strategy"] == "beam"
    draft = stages[4]
    assert (draft.end_time - draft.start_time) / 1e6 == pytest.approx(0.25, abs=0.01)
    assert request.start_time <= stages[0].start_time and stages[-1].end_time <= request.end_time


def test_the_callers_trace_goes_on_and_its_decision_holds():
    spans = spans_of((scope(traceparent=PARENT), answered()), ratio=0.0)
    assert len(spans) == 8
    assert {format(span.context.trace_id, "032x") for span in spans} == {PARENT[3:35]}
    assert format(spans[-1].parent.span_id, "016x") == PARENT[36:52]
    unsampled = scope(traceparent=PARENT[:-1] + "0")
    assert not spans_of((unsampled, answered()), ratio=1.0)
    assert len(spans_of((scope(traceparent="nonsense"), answered()))) == 8


def test_a_share_is_sampled_and_probes_are_not():
    requests = [(scope(), answered()) for _ in range(400)]
    sampled = len(spans_of(*requests, ratio=0.25)) / 8
    assert 50 <= sampled <= 150  # 100 expected, 9 standard deviations at most
    assert not spans_of((scope("/health/ready"), Trace(counted=False)))


def test_an_error_of_the_server_is_marked():
    (failed,) = spans_of((scope(), Trace(status=503, failure="not_ready")))
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "not_ready"
    (refused,) = spans_of((scope(), Trace(status=422, failure="invalid")))
    assert refused.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("variables", "name", "version"),
    [
        ({}, "recserve", installed("recserve")),
        ({"OTEL_SERVICE_NAME": "shop"}, "shop", installed("recserve")),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.version=7"}, "recserve", "7"),
        (
            {"OTEL_SERVICE_NAME": "a", "OTEL_RESOURCE_ATTRIBUTES": "service.name=b"},
            "a",
            installed("recserve"),
        ),
        ({"OTEL_SERVICE_NAME": ""}, "recserve", installed("recserve")),
    ],
)
def test_the_environment_names_the_service(monkeypatch, variables, name, version):
    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    *_, request = spans_of((scope(), answered()))
    found = request.resource.attributes
    assert (found["service.name"], found["service.version"]) == (name, version)


class Receiver(BaseHTTPRequestHandler):
    bodies: list[tuple[str, bytes]] = []

    def do_POST(self):  # noqa: N802
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_server_sends_its_spans_to_a_receiver(tmp_path):
    receiver = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=receiver.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{receiver.server_port}"
        with opened(tmp_path) as service, live(service, otlp_endpoint=url) as client:
            body = {"history": [service.samples(0, 1)["items"][0]], "k": 3}
            headers = {"traceparent": PARENT}
            assert client.post("/v1/recommend", json=body, headers=headers).status_code == 200
    finally:
        receiver.shutdown()
        thread.join()
        receiver.server_close()
    assert {path for path, _ in Receiver.bodies} == {"/v1/traces"}
    spans = [
        span
        for _, body in Receiver.bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scoped in resource.scope_spans
        for span in scoped.spans
    ]
    own = {span.name: span for span in spans if span.trace_id.hex() == PARENT[3:35]}
    assert set(own) == {*STAGES, "POST /v1/recommend"}
    assert own["POST /v1/recommend"].parent_span_id.hex() == PARENT[36:52]


@pytest.mark.slow
def test_nothing_is_imported_while_traces_are_off():
    code = (
        "import sys; from recserve.server.app import create_app; from recserve.config import *; "
        "create_app(ServerConfig(bundle='x')); "
        "names = 'opentelemetry.sdk', 'opentelemetry.exporter'; "
        "print([name for name in sys.modules if name.startswith(names)])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr
