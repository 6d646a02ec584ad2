"""Experiments of a live server in mode split: labels, exclusions, kill switch, metrics."""

import pytest

from recserve.config import ServerConfig
from recserve.experiments.assignment import ArmSplit
from recserve.schemas.items import InvalidRequest
from recserve.server.app import create_app
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

ADMIN = "an-admin-key-of-24-chars"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
WIDTH = {
    "name": "width",
    "use": "recommend",
    "seed": "2026",
    "coverage": 0.8,
    "arms": [
        {"name": "beam", "fields": {"strategy": "beam"}},
        {"name": "nezha", "fields": {"strategy": "nezha", "beam_width": 20}},
    ],
}
SCORER = {
    "name": "scorer",
    "use": "rank",
    "arms": [{"name": "ranker"}, {"name": "likelihood", "fields": {"scorer": "likelihood"}}],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('store')}"
    service = Service.open(shared_bundle(), store, "cpu")
    with live(service, experiments=[WIDTH, SCORER], admin_keys=ADMIN) as running:
        yield running


@pytest.fixture(autouse=True)
def running(client):
    yield
    for name in ("width", "scorer"):
        client.post(f"/admin/experiments/{name}:start", headers=BEARER)


@pytest.fixture(scope="module")
def users(client):
    return client.get("/playground/samples").json()["users"]


def recommend(client, user, **fields):
    answer = client.post("/v1/recommend", json={"user": {"id": user}, "k": 5, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def test_arms_follow_the_hash_and_reach_answer_header_and_token(client, users):
    split = ArmSplit.even("2026", ["beam", "nezha"], None, 0.8)
    names = [*users, *(f"new-{i}" for i in range(20))]
    arms = set()
    for user in names:
        answer = recommend(client, user)
        label, expected = answer.json()["experiment"], split.assign(user)
        arms.add(expected.arm)
        if expected.arm is None:
            assert label is None and "x-recserve-experiment" not in answer.headers
            continue
        assert label == {
            "name": "width",
            "arm": expected.arm,
            "bucket": expected.bucket,
            "hash_version": 2,
            "mode": "split",
            "sticky": True,
            "reason": None,
        }
        assert answer.headers["x-recserve-experiment"] == f"width/{expected.arm}"
        if user in users:
            assert answer.json()["strategy"] == expected.arm
        signer = client.app.state.lifecycle.service.signer
        said = signer.read(answer.json()["attribution_token"])
        assert (said.experiment, said.arm) == ("width", expected.arm)
    assert arms == {"beam", "nezha", None}


def test_the_answer_of_an_arm_is_that_of_its_fields(client, users):
    split = ArmSplit.even("2026", ["beam", "nezha"], None, 0.8)
    user = next(user for user in users if split.assign(user).arm == "nezha")
    drawn = recommend(client, user).json()
    asked = recommend(client, user, strategy="nezha", beam_width=20).json()
    names = [[item["item_id"] for item in answer["items"]] for answer in (drawn, asked)]
    assert names[0] == names[1] and drawn["strategy"] == asked["strategy"] == "nezha"
    assert asked["experiment"]["arm"] is None
    assert asked["experiment"]["reason"] == "the request sets strategy"


def test_a_field_of_the_client_wins(client, users):
    user = next(u for u in users if recommend(client, u).json()["experiment"])
    for fields, reason in (
        ({"strategy": "beam"}, "the request sets strategy"),
        ({"dense_weight": 0.5, "strategy": "auto"}, "the request sets dense_weight"),
        ({"k": 21}, "k is above the beam width 20 of an arm"),
    ):
        answer = recommend(client, user, **fields)
        label = answer.json()["experiment"]
        assert label["arm"] is None and label["reason"] == reason
        assert answer.headers["x-recserve-experiment"] == "width/-"


def test_without_a_user_the_request_id_is_hashed(client, users):
    history = client.get(f"/v1/users/{users[0]}/history").json()["events"]
    items = [event["item_id"] for event in history]
    split = ArmSplit.even("2026", ["beam", "nezha"], None, 0.8)
    name = next(f"r-{i}" for i in range(50) if split.assign(f"r-{i}").arm)
    body = {"history": items, "k": 5, "request_id": name}
    label = client.post("/v1/recommend", json=body).json()["experiment"]
    assert label["sticky"] is False and label["bucket"] == split.assign(name).bucket


def test_rank_has_its_own_experiment(client, users):
    items = client.get("/playground/samples").json()["items"][:3]
    scorers = set()
    for user in users:
        body = {"user": {"id": user}, "candidates": [{"item_id": item} for item in items]}
        answer = client.post("/v1/rank", json=body).json()
        assert answer["experiment"]["name"] == "scorer"
        assert answer["scorer"] == answer["experiment"]["arm"]
        scorers.add(answer["scorer"])
    assert scorers == {"ranker", "likelihood"}


def test_stop_and_start(client, users):
    split = ArmSplit.even("2026", ["beam", "nezha"], None, 0.8)
    user = next(user for user in users if split.assign(user).arm == "nezha")
    stopped = client.post("/admin/experiments/width:stop", headers=BEARER)
    assert stopped.status_code == 200 and stopped.json()["status"] == "stopped"
    answer = recommend(client, user).json()
    assert answer["strategy"] == "beam"
    assert (answer["experiment"]["arm"], answer["experiment"]["reason"]) == ("beam", "stopped")
    listed = client.get("/v1/experiments").json()["experiments"]
    assert [(one["name"], one["status"]) for one in listed] == [
        ("width", "stopped"),
        ("scorer", "running"),
    ]
    assert client.post("/admin/experiments/width:start", headers=BEARER).status_code == 200
    assert recommend(client, user).json()["strategy"] == "nezha"


def test_status_and_metrics_count_by_arm(client, users):
    def counts():
        (one, _) = client.get("/v1/experiments").json()["experiments"]
        return one, {arm["name"]: arm["requests"] for arm in one["arms"]}

    _, before = counts()
    split = ArmSplit.even("2026", ["beam", "nezha"], None, 0.8)
    for user in users:
        recommend(client, user)
    one, after = counts()
    drawn = [split.assign(user).arm for user in users]
    for arm in ("beam", "nezha"):
        assert after[arm] - before[arm] == drawn.count(arm)
    assert set(one) == {
        *("name", "mode", "status", "reason", "coverage", "smallest_effect", "sample_ratio_p"),
        *("warning", "started", "durable", "servers", "uncounted", "arms"),
    }
    assert set(one["arms"][0]) == {
        *("name", "weight", "requests", "errors", "empty"),
        *("p50_ms", "p99_ms", "p99_low_ms", "p99_high_ms"),
        *("answers", "goals", "verdict", "first_verdict", "users"),
    }
    assert one["arms"][0]["p50_ms"] > 0 and one["arms"][0]["weight"] == 0.5
    page = client.get("/metrics").text
    assert f'recserve_experiment_requests_total{{arm="width/beam"}} {after["beam"]:.1f}' in page
    assert 'recserve_experiment_running{experiment="width"} 1.0' in page
    timed = [line for line in page.splitlines() if "recserve_request_seconds_count" in line]
    assert any('arm="width/nezha"' in line and 'strategy="nezha"' in line for line in timed)


def test_without_admin_keys_the_routes_are_closed(tmp_path):
    with live(Service.open(shared_bundle(), f"lmdb:{tmp_path}", "cpu")) as plain:
        refused = plain.post("/admin/experiments/width:stop")
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_disabled"
        assert plain.get("/v1/experiments").json() == {"experiments": []}
        user = plain.get("/playground/samples").json()["users"][0]
        assert recommend(plain, user).json()["experiment"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "half"}, "experiments[0].mode: expected interleaved or paired"),
        ({"coverage": 2}, "experiments[0].coverage: expected `float` <= 1.0".replace("`", "")),
        (
            {"arms": [{"name": "a"}, {"name": "b", "fields": {"beam_width": 0}}]},
            "experiments[0].arms[1].fields.beam_width: expected int >= 1, got 0",
        ),
        (
            {"arms": [{"name": "a"}, {"name": "b", "fields": {"beam_wdith": 5}}]},
            "experiments[0].arms[1].fields.beam_wdith: expected a field of strategy",
        ),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "expected different names, got a, a"),
        (
            {"arms": [{"name": "a", "weight": 0.5}, {"name": "b", "weight": 0.1}]},
            "expected a weight per arm with sum 1",
        ),
        ({"use": "rank", "mode": "interleaved"}, "expected split or paired or shadow for rank"),
        ({"guards": {}}, "experiments[0].guards: unknown field; did you mean guard?"),
    ],
    ids=["mode", "coverage", "value", "field", "names", "weights", "use", "unknown"],
)
def test_a_wrong_setting_is_refused_at_start(change, words):
    config = ServerConfig(bundle="b", experiments=[{**WIDTH, **change}])
    with pytest.raises(InvalidRequest) as refused:
        create_app(config)
    assert words in str(refused.value)


def test_an_arm_that_the_models_cannot_answer_stops_the_start(tmp_path):
    wrong = {**WIDTH, "arms": [{"name": "a"}, {"name": "b", "fields": {"strategy": "rpg"}}]}
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}", "cpu")
    config = ServerConfig(bundle=shared_bundle(), experiments=[wrong], experiments_dir=tmp_path)
    app = create_app(config, service)
    lifecycle = app.state.lifecycle
    lifecycle.start()
    lifecycle.loaded.wait(30)
    service.close()
    assert "experiment width, arm b: strategy: expected one of" in str(lifecycle.failure)
