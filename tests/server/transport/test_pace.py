"""A burst is spread over turns of the event loop, and refused before it is prepared."""

import asyncio

from recserve.engine.engine_config import EngineConfig
from recserve.server.transport.pace import Pace
from recserve.service import Service, ServiceOptions
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


async def turns_of(pace: Pace, count: int) -> list[int]:
    """Returns the turn of the event loop in which each of `count` callers goes on."""
    turn, going_on = 0, []

    async def caller() -> None:
        await pace.turn()
        going_on.append(turn)

    callers = [asyncio.ensure_future(caller()) for _ in range(count)]
    while not all(one.done() for one in callers):
        await asyncio.sleep(0)
        turn += 1
    return going_on


def test_few_callers_go_on_at_once():
    assert asyncio.run(turns_of(Pace(4), 4)) == [0, 0, 0, 0]


def test_many_callers_share_the_turns():
    async def measured() -> tuple[list[int], int]:
        pace = Pace(4)
        turns = await turns_of(pace, 30)
        return turns, len(pace)

    turns, left = asyncio.run(measured())
    assert turns == sorted(turns) and left == 0
    assert max(turns.count(turn) for turn in turns) <= 4
    assert len(set(turns)) >= 8


def test_a_caller_who_leaves_takes_no_turn():
    async def measured() -> list[str]:
        pace, order = Pace(1), []

        async def caller(name: str) -> None:
            await pace.turn()
            order.append(name)

        tasks = [asyncio.ensure_future(caller(name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(measured()) == ["a", "c", "d"]


def test_requests_that_wait_for_their_turn_count_as_waiting_for_the_engine(tmp_path, monkeypatch):
    """With room for three, a fourth is refused at once, and a probe and other routes are not."""
    options = ServiceOptions(engine=EngineConfig(max_queue=3), journal=tmp_path / "items")
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu", options) as service:
        monkeypatch.setattr(Pace, "__len__", lambda _: 3)
        with live(service) as client:
            item = client.get("/playground/samples").json()["items"][0]
            body = {"history": [item], "k": 3}
            refused = client.post("/v1/recommend", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert client.get("/health/live").status_code == 200
            assert client.get(f"/v1/items/{item}").status_code == 200
            monkeypatch.setattr(Pace, "__len__", lambda _: 0)
            assert client.post("/v1/recommend", json=body).status_code == 200
