"""A live server falls back to the control when an arm fails, is slow, or returns nothing."""

import time
from dataclasses import replace

import msgspec
import pytest

from recserve.service import Service
from recserve.service.recommend import RecommendService
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

ADMIN = "an-admin-key-of-24-chars"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
# A factor that the load of a busy machine does not reach by itself.
GUARD = {"window_s": 60, "min_requests": 10, "p99_factor": 5}
SPEED = {
    "name": "speed",
    "use": "recommend",
    "guard": GUARD,
    "arms": [
        {"name": "beam", "fields": {"strategy": "beam", "beam_width": 8}},
        {"name": "nezha", "fields": {"strategy": "nezha", "beam_width": 8}},
    ],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('store')}"
    service = Service.open(shared_bundle(), store, "cpu")
    with live(service, experiments=[SPEED], admin_keys=ADMIN) as running:
        yield running


@pytest.fixture
def fault(monkeypatch):
    """Lets the requests of the treatment arm go wrong: `fail`, `slow` or `empty`."""
    real = RecommendService.begin

    def install(kind):
        def begin(self, body, request_id, deadline_s, client):
            work = real(self, body, request_id, deadline_s, client)
            if body.strategy != "nezha":
                return work
            if kind == "fail":
                raise RuntimeError("injected")
            if kind == "slow":

                def late(result, finish=work.finish):
                    time.sleep(0.5)
                    return finish(result)

                return replace(work, finish=late)
            finish = work.finish
            return replace(work, finish=lambda r: msgspec.structs.replace(finish(r), items=[]))

        monkeypatch.setattr(RecommendService, "begin", begin)

    return install


def status(client):
    (one,) = client.get("/v1/experiments").json()["experiments"]
    return one


def send_until(client, condition, seconds=60.0):
    users = client.get("/playground/samples").json()["users"]
    end = time.monotonic() + seconds
    answers = []
    while not condition():
        assert time.monotonic() < end, status(client)
        for _ in range(8):
            body = {"user": {"id": users[len(answers) % len(users)]}, "k": 4}
            answers.append(client.post("/v1/recommend", json=body))
    return answers


@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("fail", "errors", "arm nezha: error share 1.0000"),
        pytest.param("slow", "p99", "arm nezha: p99 ", marks=pytest.mark.slow),
        pytest.param(
            "empty", "empty", "arm nezha: share of empty answers 1.0000", marks=pytest.mark.slow
        ),
    ],
)
def test_a_bad_arm_is_replaced_by_the_control(client, fault, caplog, kind, cause, words):
    client.post("/admin/experiments/speed:start", headers=BEARER)
    fault(kind)
    with caplog.at_level("ERROR", "recserve"):
        answers = send_until(client, lambda: status(client)["status"] == "fallen_back")
    assert status(client)["reason"].startswith(words)
    assert "control" in status(client)["reason"]
    assert any("experiment speed fell back" in record.message for record in caplog.records)
    codes = {answer.status_code for answer in answers}
    assert codes == ({200, 500} if kind == "fail" else {200})
    # From now on every request gets the control, and the answer says why.
    for user in client.get("/playground/samples").json()["users"]:
        answer = client.post("/v1/recommend", json={"user": {"id": user}, "k": 4}).json()
        assert answer["strategy"] == "beam" and len(answer["items"]) == 4
        assert answer["experiment"]["arm"] == "beam"
        assert answer["experiment"]["reason"] == "fallen_back"
    page = client.get("/metrics").text
    line = f'recserve_experiment_fallbacks_total{{experiment="speed",reason="{cause}"}} 1.0'
    assert line in page
    assert 'recserve_experiment_running{experiment="speed"} 0.0' in page


def test_it_stays_until_an_operator_starts_it_again(client):
    assert status(client)["status"] == "fallen_back"
    started = client.post("/admin/experiments/speed:start", headers=BEARER).json()
    assert (started["status"], started["reason"]) == ("running", None)
    users = client.get("/playground/samples").json()["users"]
    found = {
        client.post("/v1/recommend", json={"user": {"id": user}, "k": 4}).json()["strategy"]
        for user in users
    }
    assert found == {"beam", "nezha"}
    assert status(client)["status"] == "running"


def test_a_bad_request_of_a_client_is_no_error_of_an_arm(client):
    before = [arm["errors"] for arm in status(client)["arms"]]
    for user in client.get("/playground/samples").json()["users"]:
        body = {"user": {"id": user}, "k": 4, "filter": {"no": 1}}
        assert client.post("/v1/recommend", json=body).status_code == 422
    assert [arm["errors"] for arm in status(client)["arms"]] == before
