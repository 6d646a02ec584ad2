"""An arm whose server is dead, slow, refusing, strange, busy, or this server itself."""

import asyncio
import threading
from contextlib import contextmanager

import httpx
import pytest
from aiohttp import web

from recserve.experiments.assignment import ArmSplit
from recserve.server.remote_arm import MAX_ANSWER_BYTES
from recserve.service import Service
from tests.support.grids import chosen
from tests.support.http_server import http_server
from tests.support.live_server import live
from tests.support.redis_server import free_port
from tests.support.tiny_bundle import shared_bundle

SPLIT = ArmSplit.even("e", ["here", "there"])
USERS = [user for user in (f"user{n:06d}" for n in range(40)) if SPLIT.assign(user).arm == "there"]
ADMIN = "an-admin-key-of-24-chars"


@contextmanager
def server(store, url, mode="split", guard=None, **arm):
    arms = [{"name": "here"}, {"name": "there", "url": url, **arm}]
    one = {"name": "e", "use": "recommend", "mode": mode, "arms": arms, "guard": guard}
    service = Service.open(shared_bundle(), f"lmdb:{store}", "cpu")
    with live(service, experiments=[one], admin_keys=[ADMIN]) as client:
        yield client


def ask(client, user=USERS[0], **fields):
    return client.post("/v1/recommend", json={"user": {"id": user}, "k": 4, **fields})


def errors(client):
    (one,) = client.get("/v1/experiments").json()["experiments"]
    return [arm["errors"] for arm in one["arms"]]


def forwarded(client):
    """Requests for the arm's server by result, without the zeros."""
    start = 'recserve_experiment_forwarded_total{arm="e/there",result="'
    lines = [x for x in client.get("/metrics").text.splitlines() if x.startswith(start)]
    found = dict(line.removeprefix(start).split('"} ') for line in lines)
    return {name: float(count) for name, count in found.items() if float(count)}


def is_control(client, answer, reason):
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["model_version"] == client.get("/version").json()["model_version"]
    assert len(said["items"]) == 4 and said["experiment"]["arm"] is None
    assert said["experiment"]["reason"] == f"the server of the arm failed: {reason}"
    assert answer.headers["x-recserve-experiment"] == "e/-"


def test_a_dead_server_is_replaced_by_the_control_and_the_guard_ends_it(tmp_path):
    guard = {"window_s": 60, "min_requests": 10}
    with server(tmp_path, f"http://127.0.0.1:{free_port()}", guard=guard) as client:
        is_control(client, ask(client), "the connection failed")
        assert errors(client) == [0, 1] and forwarded(client) == {"failed": 1}
        for _ in range(2000):
            for number in range(20):
                assert ask(client, f"user{number:06d}").status_code == 200
            (one,) = client.get("/v1/experiments").json()["experiments"]
            if one["status"] != "running":
                break
        assert one["status"] == "fallen_back"
        assert one["reason"].startswith("arm there: error share 1.0000")
        assert ask(client).json()["experiment"]["arm"] == "here"


def test_a_slow_server_leaves_half_of_the_time_to_the_control(tmp_path):
    seen = []

    async def slow(request):
        seen.append((request.headers["x-deadline-ms"], await request.json()))
        await asyncio.sleep(60)

    with http_server(slow) as url, server(tmp_path, url) as client:
        answer = ask(client, timeout_ms=3000, request_id="r-1")
        is_control(client, answer, "no answer in time")
        assert errors(client) == [0, 1] and forwarded(client) == {"late": 1}
        ((deadline_ms, body),) = seen
        assert 0 < int(deadline_ms) <= 1500
        assert body["request_id"] == answer.json()["request_id"] == "r-1"


async def redirect(request):
    raise web.HTTPFound("/elsewhere")


async def refuse(request):
    return web.json_response({"error": {}}, status=422)


async def fail(request):
    return web.Response(status=500)


async def overloaded(request):
    return web.Response(status=429)


async def unauthorized(request):
    return web.Response(status=401)


async def strange(request):
    return web.Response(text="<html>")


async def huge(request):
    return web.Response(body=b" " * (MAX_ANSWER_BYTES + 1))


async def cut(request):
    request.transport.close()
    return web.Response()


OTHERS = {
    redirect: "status 302",
    refuse: "status 422",
    fail: "status 500",
    overloaded: "status 429",
    unauthorized: "status 401",
    strange: "the answer has another format",
    huge: f"the answer has more than {MAX_ANSWER_BYTES} bytes",
    cut: "the connection failed",
}


def test_any_other_answer_is_replaced_by_the_control(tmp_path):
    current, paths = [fail], []

    async def noted(request):
        paths.append(request.path)
        return await current[0](request)

    with http_server(noted) as url, server(tmp_path, url) as client:
        for number, (handler, reason) in enumerate(OTHERS.items(), 1):
            current[0] = handler
            is_control(client, ask(client), reason)
            assert errors(client) == [0, number]
            assert paths == ["/v1/recommend"] * number
        assert forwarded(client) == {"refused": 1, "failed": len(OTHERS) - 1}


@pytest.mark.parametrize("mode", ["split", "paired", "interleaved"])
def test_a_bad_request_of_a_client_is_no_error_of_the_arm(tmp_path, mode):
    with http_server(refuse) as url, server(tmp_path, url, mode) as client:
        for number in range(6):
            bad = ask(client, filter={"no": 1}, request_id=f"r-{number}")
            assert bad.status_code == 422 and bad.json()["error"]["param"] == "filter.no"
        assert errors(client) == [0, 0]
        # The control answers these, so the refusal is an error of the arm.
        for number in range(6):
            assert ask(client, request_id=f"r-{number}").status_code == 200
        assert errors(client) == [0, 6]


def test_a_late_server_in_the_other_modes(tmp_path):
    async def slow(request):
        await asyncio.sleep(60)

    with http_server(slow) as url:
        for mode in ("paired", "interleaved"):
            with server(tmp_path / mode, url, mode) as client:
                for number in range(2):
                    answer = ask(client, timeout_ms=1500, request_id=f"r-{number}")
                    assert answer.status_code == 200 and len(answer.json()["items"]) == 4
                assert set(forwarded(client)) == {"late"}


@pytest.mark.parametrize("mode", chosen(("split", "paired", "interleaved"), "split"))
def test_a_client_that_leaves_ends_the_request_to_the_arm(tmp_path, mode):
    """The connection to the arm closes although the deadline is far away."""
    arrived, left = threading.Event(), threading.Event()

    async def hold(request):
        arrived.set()
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        left.set()
        return web.Response()

    with http_server(hold) as url, server(tmp_path, url, mode) as client:
        with httpx.Client(base_url=client.base_url) as own, pytest.raises(httpx.ReadTimeout):
            own.timeout = httpx.Timeout(30, read=1)
            ask(own, timeout_ms=60_000)
        assert arrived.wait(30) and left.wait(30)
        assert errors(client)[1] == 0


def test_too_many_requests_at_once_get_the_control(tmp_path):
    arrived, release = threading.Event(), threading.Event()

    async def hold(request):
        arrived.set()
        await asyncio.to_thread(release.wait, 30)
        return web.Response(status=500)

    with http_server(hold) as url, server(tmp_path, url, max_in_flight=1) as client:
        first = []

        def send():
            with httpx.Client(base_url=client.base_url, timeout=60) as own:
                first.append(ask(own, timeout_ms=60_000).status_code)

        thread = threading.Thread(target=send)
        thread.start()
        assert arrived.wait(30)
        is_control(client, ask(client, USERS[1]), "1 requests are in progress")
        assert forwarded(client) == {"busy": 1} and errors(client) == [0, 1]
        release.set()
        thread.join()
        assert first == [200] and forwarded(client) == {"busy": 1, "failed": 1}


def test_a_circle_of_servers_ends_after_one_round(tmp_path):
    """A relay sends what it gets, with all headers, back to the server that forwarded it."""
    origin, headers = [], []

    async def relay(request):
        headers.append(request.headers["x-recserve-untracked"])
        async with httpx.AsyncClient(base_url=origin[0]) as onward:
            body = await request.read()
            answer = await onward.post(request.path, content=body, headers=dict(request.headers))
        return web.Response(body=answer.content, content_type="application/json")

    with http_server(relay) as url, server(tmp_path, url) as client:
        origin.append(str(client.base_url))
        answer = ask(client)
        assert answer.status_code == 200 and answer.json()["experiment"]["arm"] == "there"
        assert headers == ["e/there"] and forwarded(client) == {"answered": 1}


def test_a_proxy_of_the_environment_is_not_used(tmp_path, monkeypatch):
    paths = []

    async def proxy(request):
        paths.append(request.path)
        return web.Response(status=500)

    with http_server(proxy) as url, http_server(fail) as arm, server(tmp_path, arm) as client:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        is_control(client, ask(client), "status 500")
        assert paths == []
