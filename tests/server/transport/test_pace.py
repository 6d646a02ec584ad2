"""A burst is spread over turns of the event loop, and refused before it is prepared."""

import asyncio

import uvicorn
from uvicorn.server import ServerState

from recserve.engine.engine_config import EngineConfig
from recserve.metrics import Metrics
from recserve.server.transport.connection import Connection
from recserve.server.transport.connection_limits import ConnectionLimits
from recserve.server.transport.pace import Arrivals, TurnLimiter
from recserve.service import Service, ServiceOptions
from tests.support.live_server import live
from tests.support.raw_http import Wire
from tests.support.tiny_bundle import shared_bundle


async def turns_of(call, count: int) -> list[int]:
    """Returns the turn of the event loop in which each of `count` calls is made."""
    turn, turns = 0, []
    for _ in range(count):
        call(lambda *_: turns.append(turn))
    while len(turns) < count:
        turn += 1
        await asyncio.sleep(0)
    return turns


def test_few_calls_are_made_at_once():
    assert asyncio.run(turns_of(TurnLimiter(4).call, 4)) == [0, 0, 0, 0]


def test_many_calls_share_the_turns():
    pace = TurnLimiter(4)
    turns = asyncio.run(turns_of(pace.call, 30))
    assert turns == sorted(turns) and len(pace) == 0
    assert max(turns.count(turn) for turn in turns) <= 4
    assert len(set(turns)) >= 8


def test_connections_beyond_the_queue_do_not_wait_for_those_before_them():
    async def called() -> list[tuple[int, int]]:
        arrivals, order = Arrivals(10), []
        for number in range(4 + 10 + 3):
            arrivals.call(lambda ahead, number=number: order.append((number, ahead)))
        while len(order) < 17:
            await asyncio.sleep(0)
        return order

    order = asyncio.run(called())
    assert order[:7] == [(0, 0), (1, 0), (2, 0), (3, 0), (14, 10), (15, 10), (16, 10)]
    assert order[7:] == [(number, 0) for number in range(4, 14)]


async def echo(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def served(*sent: bytes, leave: int | None = None) -> list[Connection]:
    """Sends bytes on one connection each, in one turn of the event loop, and lets some pass.

    Args:
        sent: The bytes.
        leave: The connection that is lost in that turn.
    """
    config = uvicorn.Config(echo, log_config=None)
    limits, arrivals = ConnectionLimits(), Arrivals(1024)
    state, metrics = ServerState(), Metrics((), (), lambda: None)
    made = []
    for part in sent:
        one = Connection(config, state, {}, limits=limits, metrics=metrics, arrivals=arrivals)
        one.connection_made(Wire())
        one.data_received(part)
        made.append(one)
    begun = [one.cycle is not None for one in made]
    if leave is not None:
        made[leave].transport.is_closing = lambda: True
        made[leave].connection_lost(None)
    for _ in range(50):
        await asyncio.sleep(0)
    for one in made:
        one.begun = begun.pop(0)
    return made


def test_a_probe_waits_for_no_other_request():
    one, probe = (b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"/a", b"/health/live"))
    *many, last = asyncio.run(served(*[one] * 20, probe))
    assert [each.begun for each in many] == [True] * 4 + [False] * 16 and last.begun
    assert all(b"200 OK" in each.transport.written for each in (*many, last))


def test_bytes_that_come_while_a_connection_waits_belong_to_its_request():
    async def run() -> bytes:
        config = uvicorn.Config(echo, log_config=None)
        arrivals, metrics = Arrivals(1024), Metrics((), (), lambda: None)
        for _ in range(8):
            arrivals.call(lambda ahead: None)
        one = Connection(
            config, ServerState(), {}, limits=ConnectionLimits(), metrics=metrics, arrivals=arrivals
        )
        one.connection_made(Wire())
        one.data_received(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        one.data_received(b"x" * 99_999)
        paused = one.transport.paused
        one.data_received(b"x")
        for _ in range(50):
            await asyncio.sleep(0)
        assert paused and not one.transport.paused
        return bytes(one.transport.written)

    assert b"200 OK" in asyncio.run(run())


def test_a_drain_does_not_refuse_a_body_that_waits_for_its_turn():
    async def run() -> bytes:
        config = uvicorn.Config(echo, log_config=None)
        arrivals, metrics = Arrivals(1024), Metrics((), (), lambda: None)
        one = Connection(
            config, ServerState(), {}, limits=ConnectionLimits(), metrics=metrics, arrivals=arrivals
        )
        one.connection_made(Wire())
        one.data_received(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
        for _ in range(8):
            arrivals.call(lambda ahead: None)
        one.data_received(b"x")
        for _ in range(3):
            one.drain()
        for _ in range(50):
            await asyncio.sleep(0)
        return bytes(one.transport.written)

    said = asyncio.run(run())
    assert b"200 OK" in said and b"connection: close" not in said


def test_a_connection_that_is_lost_takes_no_turn():
    one = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    made = asyncio.run(served(*[one] * 10, leave=7))
    assert [bool(each.transport.written) for each in made] == [True] * 7 + [False] + [True] * 2


def test_requests_that_wait_for_their_turn_count_as_waiting_for_the_engine(tmp_path, monkeypatch):
    """With room for three, a fourth is refused at once, and a probe and other routes are not."""
    options = ServiceOptions(engine=EngineConfig(max_queue=3), journal=tmp_path / "items")
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu", options) as service:
        monkeypatch.setattr(TurnLimiter, "__len__", lambda _: 3)
        with live(service, max_queue=3) as client:
            item = client.get("/playground/samples").json()["items"][0]
            body = {"history": [item], "k": 3}
            refused = client.post("/v1/recommend", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert client.get("/health/live").status_code == 200
            assert client.get(f"/v1/items/{item}").status_code == 200
            monkeypatch.setattr(TurnLimiter, "__len__", lambda _: 0)
            assert client.post("/v1/recommend", json=body).status_code == 200
