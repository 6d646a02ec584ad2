"""Clicks of a running server's experiment: attribution, repetition, restarts, other settings."""

import shutil

import pytest

from recserve.config import ConfigError, ServerConfig
from recserve.server.app import create_app
from recserve.service import Service, ServiceOptions
from recserve.service.slate_log.reader import read_log
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

ADMIN = "an-admin-key-of-24-chars"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
ONE = {
    "name": "fast",
    "use": "recommend",
    "goals": ["click", "purchase"],
    "arms": [
        {"name": "control", "fields": {"strategy": "beam"}},
        {"name": "nezha", "fields": {"strategy": "nezha"}},
    ],
}
USERS = [f"someone-{number}" for number in range(12)]


@pytest.fixture
def server(tmp_path):
    """Opens servers one after another on one folder, one store and one signing key."""

    def opened(**changes):
        options = ServiceOptions(signing_key=b"k" * 16, journal=tmp_path / "items")
        service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu", options)
        settings = {"experiments_dir": tmp_path / "counts", "admin_keys": ADMIN, **changes}
        return live(service, **{"experiments": [ONE], **settings})

    return opened


def recommend(client, user, **fields):
    body = {"user": {"id": user}, "k": 3, **fields}
    answer = client.post("/v1/recommend", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def event(user, slate, place=0, event_type="click", **fields):
    return {
        "user_id": user,
        "item_id": slate["items"][place]["item_id"],
        "type": event_type,
        "attribution_token": slate["attribution_token"],
        **fields,
    }


def send(client, *events):
    said = client.post("/v1/events", json={"events": list(events)})
    assert said.status_code == 200, said.text
    return said.json()


def counts(client):
    """Answers, clicks and purchases by arm."""
    (one,) = client.get("/v1/experiments").json()["experiments"]
    return {
        arm["name"]: (arm["answers"], *(goal["events"] for goal in arm["goals"]))
        for arm in one["arms"]
    }


def test_clicks_count_once_for_the_arm_that_answered_and_survive_a_restart(server):
    expected = {"control": [0, 0, 0], "nezha": [0, 0, 0]}
    with server() as client:
        slates = {}
        for user in USERS:
            slate = slates[user] = recommend(client, user)
            click = event(user, slate, event_id=f"c-{user}")
            mine = expected[slate["experiment"]["arm"]]
            mine[0] += 1
            mine[1] += 1
            send(client, click)
            send(client, click)  # a retry
            send(client, event(user, slate, event_id=f"again-{user}"))  # the same item again
            send(client, event(user, slate, event_type="view"))  # no goal
            send(client, event(user, slate, attribution_token=None))
        for user in USERS[:5]:
            slate = slates[user]
            expected[slate["experiment"]["arm"]][1] += 1
            expected[slate["experiment"]["arm"]][2] += 1
            send(client, event(user, slate, 1), event(user, slate, 1, "purchase"))
        forged = event("eve", slates[USERS[0]])
        assert send(client, forged)["unattributed"][0]["index"] == 0
        unknown = event(USERS[0], slates[USERS[0]], item_id="no such item")
        assert send(client, unknown)["rejected"]
        told = {arm: tuple(numbers) for arm, numbers in expected.items()}
        assert counts(client) == told
        assert all(numbers[0] for numbers in told.values())
    with server() as client:
        assert counts(client) == told
        send(client, event(USERS[0], slates[USERS[0]]))  # the retry comes after the restart
        assert counts(client) == told
        send(client, event(USERS[0], slates[USERS[0]], 2))  # of a slate before the restart
        expected[slates[USERS[0]]["experiment"]["arm"]][1] += 1
        told = {arm: tuple(numbers) for arm, numbers in expected.items()}
        assert counts(client) == told
    with server(experiments=[{**ONE, "seed": "another"}]) as client:
        assert set(counts(client).values()) == {(0, 0, 0)}


def test_an_answer_that_takes_no_part_counts_for_no_arm(server):
    with server() as client:
        own = recommend(client, USERS[0], strategy="beam")
        assert own["experiment"]["arm"] is None
        client.post("/admin/experiments/fast:stop", headers=BEARER)
        stopped = recommend(client, USERS[1])
        assert stopped["experiment"]["arm"] == "control"
        send(client, event(USERS[0], own), event(USERS[1], stopped))
        assert set(counts(client).values()) == {(0, 0, 0)}


def test_a_stop_that_cannot_be_written_stops_here_and_says_so(server, tmp_path):
    with server() as client:
        assert client.get("/v1/experiments").json()["experiments"][0]["durable"]
        shutil.rmtree(tmp_path / "counts")
        for change, words in (("stop", "is stopped, but runs again"), ("start", "is not started")):
            refused = client.post(f"/admin/experiments/fast:{change}", headers=BEARER)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "experiment_not_saved"
            assert f"experiment fast {words}" in refused.json()["error"]["message"]
            (one,) = client.get("/v1/experiments").json()["experiments"]
            assert (one["status"], one["durable"]) == ("stopped", False)
        assert {recommend(client, user)["experiment"]["arm"] for user in USERS} == {"control"}
        (tmp_path / "counts").mkdir()
        assert client.post("/admin/experiments/fast:start", headers=BEARER).json()["durable"]


def test_a_history_without_a_user_is_a_unit_of_its_own(server):
    with server() as client:
        items = client.get("/playground/samples").json()["items"]
        body = {"history": items[:2], "k": 3}
        slates = [client.post("/v1/recommend", json=body).json() for _ in range(8)]
        for slate in slates:
            assert not slate["experiment"]["sticky"]
            send(client, event("anyone", slate))
        assert sum(arm[0] for arm in counts(client).values()) == 8
        assert sum(arm[1] for arm in counts(client).values()) == 8


def test_clicks_on_an_interleaved_slate_count_for_the_team_of_their_item(server):
    mixed = {**ONE, "mode": "interleaved"}
    expected = {"control": [0, 0, 0], "nezha": [0, 0, 0]}
    with server(experiments=[mixed]) as client:
        for user in USERS:
            slate = recommend(client, user, k=7)
            for place, item in enumerate(slate["items"][:3]):
                expected[item["team"]][1] += 1
                click = event(user, slate, place)
                send(client, click)
                send(client, click)  # a retry
        shown = {item["item_id"] for item in slate["items"]}
        items = client.get("/playground/samples").json()["items"]
        hidden = next(item for item in items if item not in shown)
        assert send(client, event(USERS[-1], slate, item_id=hidden))["unattributed"]
        own = recommend(client, USERS[0], strategy="beam")  # takes no part
        send(client, event(USERS[0], own))
        for each in expected.values():
            each[0] = len(USERS)
        told = {arm: tuple(numbers) for arm, numbers in expected.items()}
        assert counts(client) == told and all(numbers[1] for numbers in told.values())
        long = recommend(client, USERS[0], k=1000)
        last = len(long["items"]) - 1
        send(client, event(USERS[0], long, last, "purchase"))
        expected[long["items"][last]["team"]][2] += 1
        for each in expected.values():
            each[0] += 1
        told = {arm: tuple(numbers) for arm, numbers in expected.items()}
        assert counts(client) == told
    with server(experiments=[mixed]) as client:
        assert counts(client) == told
    with server() as client:  # tokens of another mode
        send(client, event(USERS[0], slate))
        assert set(counts(client).values()) == {(0, 0, 0)}


SPLIT_RANK = [{"name": "ranker"}, {"name": "likelihood", "fields": {"scorer": "likelihood"}}]


@pytest.mark.parametrize("use", ["plain", "split", "interleaved", "paired", "rank", "rank:batch"])
def test_a_click_on_an_item_that_the_answer_did_not_show_counts_nowhere(server, tmp_path, use):
    mode = use if use in ("split", "interleaved", "paired") else "split"
    one = {**ONE, "mode": mode, "coverage": 1e-9 if use == "plain" else 1.0}
    if use == "paired":
        del one["goals"]
    if use.startswith("rank"):
        one = {"name": "fast", "use": "rank", "arms": SPLIT_RANK}
    log = tmp_path / "slates"
    with server(experiments=[one], slate_log=log, slate_log_rotate_s=3600) as client:
        items = client.get("/playground/samples").json()["items"]
        body = {"history": items[:2], "candidates": [{"item_id": item} for item in items[:3]]}
        if use == "rank":
            slate = client.post("/v1/rank", json=body).json()
        elif use == "rank:batch":
            found = client.post("/v1/rank:batch", json={"requests": [body]}).json()
            slate = found["results"][0]["answer"]
        else:
            slate = client.post("/v1/recommend", json={"history": items[:2], "k": 3}).json()
        shown = {item["item_id"] for item in slate["items"]}
        hidden = [item for item in items if item not in shown]
        kinds = ["click", "purchase", "view"]
        said = send(
            client,
            *(
                event("eve", slate, item_id=item, type=kinds[number % 3])
                for number, item in enumerate(hidden)
            ),
        )
        assert said["accepted"] == len(hidden) > 3
        assert len(said["unattributed"]) == len(hidden)
        assert "did not show item" in said["unattributed"][0]["reason"]
        assert not any(sum(each) for _, *each in counts(client).values())
        assert "unattributed" not in send(client, *(event("eve", slate, n) for n in range(3)))
    assert {*read_log(log, "outcomes").column("item_id").to_pylist()} == shown


def test_a_goal_that_is_no_event_type_stops_the_start(tmp_path):
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    wrong = {**ONE, "goals": ["clik"]}
    config = ServerConfig(bundle=shared_bundle(), experiments=[wrong], experiments_dir=tmp_path)
    lifecycle = create_app(config, service).state.lifecycle
    lifecycle.start()
    lifecycle.loaded.wait(30)
    service.close()
    words = "experiment fast, goals: type is 'clik'; expected one of click"
    assert words in str(lifecycle.failure)


def test_a_folder_that_cannot_be_used_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "counts"
    config = ServerConfig(bundle=tmp_path, experiments=[ONE], experiments_dir=folder)
    with pytest.raises(ConfigError, match="experiments_dir: .*counts cannot be used"):
        create_app(config)


@pytest.mark.parametrize("bundles_dir", [False, True])
def test_counts_are_by_default_next_to_the_bundle(tmp_path, bundles_dir):
    (tmp_path / "shelf" / "shop").mkdir(parents=True)
    settings = {"bundle": tmp_path / "shelf" / "shop", "experiments": [ONE]}
    if bundles_dir:
        settings["bundles_dir"] = tmp_path / "shelf"
    create_app(ServerConfig(**settings))
    folder = ".experiments" if bundles_dir else "shop.experiments"
    assert (tmp_path / "shelf" / folder).is_dir()


def test_a_server_goes_on_if_it_cannot_write_next_to_the_bundle(tmp_path, caplog):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop.experiments").write_text("")
    create_app(ServerConfig(bundle=tmp_path / "shop", experiments=[ONE]))
    assert "the counts of experiments end with this process" in caplog.text
