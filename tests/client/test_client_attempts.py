"""Retries, deadlines, keys and streams of the client, against scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from recserve.client import ApiError, AsyncClient, Client, ClientOptions, DeadlinePassed
from recserve.schemas.admin import BundleLoadRequest
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.text import CompletionRequest

COUNTS = {"accepted": 1, "duplicates": 0, "corrected": 0, "rejected": []}


def refusal(status: int, code: str, retry_after: str | None = "1") -> httpx.Response:
    detail = {"message": f"say {code}", "type": "t", "param": None, "code": code}
    headers = {"X-Request-Id": "r-7"} | (
        {} if retry_after is None else {"Retry-After": retry_after}
    )
    return httpx.Response(status, json={"error": detail}, headers=headers)


class Script:
    """Gives one prepared answer after the other, and records requests and waits."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits between attempts, which take no time."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


def client_of(script: Callable, **options: object) -> Client:
    return Client("http://s", ClientOptions(**options), transport=httpx.MockTransport(script))


def test_429_and_503_are_retried_after_the_time_that_the_server_names(waits):
    script = Script(
        refusal(429, "queue_full", "2"),
        refusal(503, "not_ready", "1"),
        httpx.Response(200, json={}),
    )
    assert client_of(script).version() == {}
    assert len(waits) == 2
    assert 2 <= waits[0] <= 2.1 and 1 <= waits[1] <= 1.2


def test_the_number_of_attempts_is_bounded(waits):
    script = Script(*[refusal(503, "not_ready", None) for _ in range(9)])
    with pytest.raises(ApiError) as caught:
        client_of(script, retries=2).version()
    assert len(script.requests) == 3 and len(waits) == 2
    assert (caught.value.status, caught.value.error.code) == (503, "not_ready")
    assert caught.value.request_id == "r-7"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 504])
def test_other_errors_are_not_retried(status, waits):
    with pytest.raises(ApiError, match=f"{status} c: say c"):
        client_of(Script(refusal(status, "c"))).version()
    assert waits == []


def test_a_wait_that_ends_after_the_deadline_is_not_begun(waits):
    with pytest.raises(ApiError, match="429"):
        client_of(Script(refusal(429, "queue_full", "3")), deadline_s=2.0).version()
    assert waits == []


def test_a_wait_longer_than_the_bound_ends_the_attempts(waits):
    with pytest.raises(ApiError, match="429"):
        client_of(Script(refusal(429, "queue_full", "4")), max_wait_s=3.0).version()
    assert waits == []


def test_events_without_ids_are_not_sent_twice_after_the_server_began(waits):
    bare = EventsRequest(events=[EventInput(user_id="u", item_id="x")])
    named = EventsRequest(events=[EventInput(user_id="u", item_id="x", event_id="e")])
    with pytest.raises(ApiError):
        client_of(Script(refusal(503, "history_unavailable"))).add_events(bare)
    for body, code in ((bare, "not_ready"), (named, "history_unavailable")):
        script = Script(refusal(503, code), httpx.Response(200, json=COUNTS))
        assert client_of(script).add_events(body).accepted == 1


def test_a_refused_connection_is_tried_again(waits):
    script = Script(httpx.ConnectError("refused"), httpx.Response(200, json={}))
    assert client_of(script).version() == {}
    with pytest.raises(httpx.ConnectError):
        client_of(Script(*[httpx.ConnectError("refused")] * 2), retries=1).version()


def test_the_deadline_is_sent_and_shrinks(waits):
    script = Script(refusal(503, "not_ready", "0"), httpx.Response(200, json={}))
    client_of(script).version(deadline_s=3.0)
    sent = [int(request.headers["x-deadline-ms"]) for request in script.requests]
    assert 0 < sent[1] <= sent[0] <= 3000
    with pytest.raises(DeadlinePassed, match="GET /version"):
        client_of(Script(httpx.ReadTimeout("late"))).version()
    with pytest.raises(DeadlinePassed):
        client_of(Script()).version(deadline_s=-1.0)


def test_keys_are_sent_where_they_belong():
    script = Script(*[httpx.Response(200, json={}) for _ in range(1)], refusal(403, "x"))
    client = client_of(script, api_key="plain", admin_key="secret")
    client.version()
    with pytest.raises(ApiError):
        client.load_bundle(BundleLoadRequest(path="two"))
    assert [r.headers["authorization"] for r in script.requests] == [
        "Bearer plain",
        "Bearer secret",
    ]
    assert "secret" not in repr(client.options)


def test_an_answer_of_a_proxy_is_an_error_too(waits):
    with pytest.raises(ApiError, match="502 unknown: <html>"):
        client_of(Script(httpx.Response(502, text="<html>"))).version()


def piece(text: str) -> dict:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return {
        **{"id": "1", "object": "text_completion", "created": 1, "model": "m"},
        **{"system_fingerprint": "f", "choices": [choice]},
    }


def events_of(*said: object) -> httpx.Response:
    lines = [f"data: {json.dumps(one) if isinstance(one, dict) else one}\n\n" for one in said]
    return httpx.Response(200, text="".join(lines), headers={"content-type": "text/event-stream"})


def test_a_stream_is_retried_before_it_begins_and_read_to_its_end(waits):
    script = Script(refusal(503, "not_ready"), events_of(piece("a"), piece("b"), "[DONE]"))
    body = CompletionRequest(prompt="x")
    texts = [c.choices[0].text for c in client_of(script).stream_completion(body)]
    assert texts == ["a", "b"] and len(waits) == 1
    assert json.loads(script.requests[1].content)["stream"] is True


def test_an_error_inside_a_stream_is_raised():
    detail = {"message": "no", "type": "t", "param": None, "code": "deadline_exceeded"}
    script = Script(events_of(piece("a"), {"error": detail}, "[DONE]"))
    stream = client_of(script).stream_completion(CompletionRequest(prompt="x"))
    assert next(stream).choices[0].text == "a"
    with pytest.raises(ApiError, match="deadline_exceeded"):
        next(stream)


def test_the_asynchronous_client_does_the_same():
    async def run() -> tuple[dict, list[str]]:
        script = Script(
            refusal(503, "not_ready", "0"),
            httpx.Response(200, json={"version": "1"}),
            events_of(piece("a"), piece("b"), "[DONE]"),
        )
        async with AsyncClient("http://s", transport=httpx.MockTransport(script)) as client:
            said = await client.version()
            stream = client.stream_completion(CompletionRequest(prompt="x"))
            return said, [chunk.choices[0].text async for chunk in stream]

    assert asyncio.run(run()) == ({"version": "1"}, ["a", "b"])


@pytest.mark.parametrize("options", [{"deadline_s": 0}, {"retries": -1}, {"max_wait_s": -1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ClientOptions(**options)
