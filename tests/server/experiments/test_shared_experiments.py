"""Two servers with one catalogue in Redis have one experiment: counts, verdict, switch, metrics."""

import time
from contextlib import ExitStack

import pytest

from recserve.service import Service, ServiceOptions
from tests.support.live_server import live
from tests.support.redis_server import servers, start_redis
from tests.support.tiny_bundle import shared_bundle

KEY = "k" * 16
ADMIN = "an-admin-key-of-24-chars"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
ONE = {
    "name": "fast",
    "use": "recommend",
    "guard": None,
    "goals": ["click"],
    "arms": [
        {"name": "control", "fields": {"strategy": "beam"}},
        {"name": "nezha", "fields": {"strategy": "nezha"}},
    ],
}
USERS = [f"someone-{number}" for number in range(12)]


@pytest.fixture
def fleet(tmp_path):
    """Yields clients of two servers, and functions that end and start their Redis."""
    with ExitStack() as stack:
        started = stack.enter_context(servers())
        always = ("--appendonly", "yes", "--appendfsync", "always")
        server, port = start_redis(tmp_path, 0, *always)
        started.append(server)
        clients = []
        for number in range(2):
            options = ServiceOptions(signing_key=KEY.encode(), journal=tmp_path / f"items{number}")
            store = f"lmdb:{tmp_path}/store{number}"
            service = Service.open(shared_bundle(), store, "cpu", options)
            settings = {"catalog_log": f"redis://127.0.0.1:{port}/0", "signing_key": KEY}
            settings |= {"experiments": [ONE], "admin_keys": ADMIN}
            clients.append(stack.enter_context(live(service, **settings)))

        def kill():
            started[-1].kill()
            started[-1].wait()

        def start():
            started.append(start_redis(tmp_path, port, *always)[0])

        for client in clients:
            until(lambda client=client: status(client)["status"] == "running")
        yield clients, kill, start


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def status(client):
    (one,) = client.get("/v1/experiments").json()["experiments"]
    return one


def recommend(client, user):
    answer = client.post("/v1/recommend", json={"user": {"id": user}, "k": 3})
    assert answer.status_code == 200, answer.text
    return answer.json()


def click(client, user, slate, item=None, **fields):
    item = slate["items"][0]["item_id"] if item is None else item
    event = {"user_id": user, "item_id": item, "type": "click", "event_id": f"{user} {item}"}
    event |= {"attribution_token": slate["attribution_token"], **fields}
    return client.post("/v1/events", json={"events": [event]})


def counts(client):
    arms = status(client)["arms"]
    return {
        arm["name"]: (arm["requests"], arm["users"], arm["answers"], arm["goals"][0]["events"])
        for arm in arms
    }


def metrics(client):
    lines = client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("recserve_experiment")]


def test_answers_of_one_server_and_clicks_on_the_other(fleet):
    clients, kill, start = fleet
    items = clients[0].get("/playground/samples").json()["items"]
    expected = {"control": [0, 0, 0, 0], "nezha": [0, 0, 0, 0]}
    for number, user in enumerate(USERS):
        here, there = clients[number % 2], clients[1 - number % 2]
        slate = recommend(here, user)
        shown = {item["item_id"] for item in slate["items"]}
        unseen = next(item for item in items if item not in shown)
        assert click(there, user, slate, unseen).json()["unattributed"]
        for client in (there, there, here):  # before the answer's delta, and again
            assert click(client, user, slate).status_code == 200
        mine = expected[slate["experiment"]["arm"]]
        for place in range(4):
            mine[place] += 1
    told = {name: tuple(values) for name, values in expected.items()}
    for client in clients:
        until(lambda client=client: counts(client) == told)
    until(lambda: metrics(clients[0]) == metrics(clients[1]))
    assert any(f'arm="fast/nezha"}} {float(told["nezha"][0])}' in m for m in metrics(clients[0]))
    found = [[arm["verdict"] for arm in status(client)["arms"]] for client in clients]
    assert found[0] == found[1] and status(clients[0])["servers"] == 2

    assert clients[0].post("/admin/experiments/fast:stop", headers=BEARER).status_code == 200
    stopped = time.monotonic()
    until(lambda: status(clients[1])["status"] == "stopped", 2.0)
    assert time.monotonic() < stopped + 2.0
    assert {recommend(clients[1], user)["experiment"]["arm"] for user in USERS} == {"control"}
    assert clients[1].post("/admin/experiments/fast:start", headers=BEARER).status_code == 200
    until(lambda: status(clients[0])["status"] == "running")

    slate = recommend(clients[0], USERS[0])
    kill()
    time.sleep(2.0)
    labels = [recommend(client, user)["experiment"] for client in clients for user in USERS]
    assert {(one["arm"], one["reason"]) for one in labels} == {("control", "unknown")}
    refused = [click(clients[0], USERS[0], slate)]
    refused += [
        clients[0].post(f"/admin/experiments/fast:{change}", headers=BEARER)
        for change in ("start", "stop")
    ]
    for answer in refused:
        assert answer.status_code == 503 and "127.0.0.1" not in answer.text
        assert answer.json()["error"]["code"] == "experiment_not_saved"
    assert not status(clients[0])["durable"]
    start()
    for client in clients:  # the stop was not acknowledged; the server goes on trying
        until(lambda client=client: status(client)["status"] == "stopped")
    assert click(clients[1], USERS[0], slate).status_code == 200
    arm = slate["experiment"]["arm"]
    until(lambda: counts(clients[0])[arm][3] == told[arm][3] + 1)
    until(lambda: counts(clients[0])[arm][0] == told[arm][0] + 1)
    assert status(clients[0])["uncounted"] == 0
