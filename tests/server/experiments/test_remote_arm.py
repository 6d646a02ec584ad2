"""An arm with a second live server: versions, labels, modes, loops, metrics."""

from contextlib import contextmanager

import pytest

from recserve.experiments.assignment import ArmSplit
from recserve.service import Service
from tests.support.bundle_shelf import DROPPED, shelf
from tests.support.experiment_client import K, arms, ask, ids, metric
from tests.support.live_server import live

NAME = "versions"
SPLIT = ArmSplit.even(NAME, ["here", "there"])
KEY, SIGNING_KEY = "an-api-key-of-22-chars", b"a signing key of some length"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("arms")


@pytest.fixture(scope="module")
def there(folder):
    """The arm's server: its catalogue has two items more, and it wants a key."""
    service = Service.open(shelf(folder) / "one", f"lmdb:{folder}/there", "cpu")
    with live(service, api_keys=[KEY]) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        client.users = client.get("/playground/samples").json()["users"]
        (folder / "key").write_text(f"{KEY}\n")
        yield client


@contextmanager
def server(folder, there, mode="split", use="recommend", **more):
    url, store = str(there.base_url), f"lmdb:{folder}/here"
    arm = {"name": "there", "url": url, "api_key_file": str(folder / "key")}
    one = {"name": NAME, "use": use, "mode": mode, "arms": [{"name": "here"}, arm], "guard": None}
    service = Service.open(folder / "bundles" / "other", store, "cpu")
    with live(service, experiments=[one], signing_key=SIGNING_KEY.decode(), **more) as client:
        yield client


def alone(client, user):
    """The answer of a server outside its experiments."""
    body, header = {"user": {"id": user}, "k": K}, {"x-recserve-untracked": "test"}
    answer = client.post("/v1/recommend", json=body, headers=header).json()
    assert answer["experiment"] is None
    return answer


def versions(client):
    found = client.get("/version").json()
    return found["model_version"], found["catalog_version"]


def counts(client):
    return {name: (arm["requests"], arm["errors"]) for name, arm in arms(client).items()}


def forwarded(client, result):
    return metric(client, "forwarded", arm=f"{NAME}/there", result=result)


def test_each_arm_answers_with_its_own_bundle(folder, there):
    with server(folder, there) as client:
        own, other = versions(client), versions(there)
        assert own[0] != other[0] and own[1] != other[1]
        drawn = {"here": 0, "there": 0}
        for number, user in enumerate(there.users):
            answer = ask(client, user, request_id=f"r-{number}")
            arm = SPLIT.assign(user).arm
            drawn[arm] += 1
            assert answer["experiment"]["arm"] == arm and answer["experiment"]["reason"] is None
            assert answer["experiment"]["bucket"] == SPLIT.assign(user).bucket
            said = answer["model_version"], answer["catalog_version"]
            assert said == (own if arm == "here" else other)
            assert ids(answer) == ids(alone(client if arm == "here" else there, user))
            assert answer["request_id"] == f"r-{number}"
            token = client.app.state.lifecycle.service.signer.read(answer["attribution_token"])
            assert (token.experiment, token.arm) == (NAME, arm)
            assert (token.model_version, token.catalog_version) == said
        assert all(drawn.values())
        assert counts(client) == {arm: (count, 0) for arm, count in drawn.items()}
        assert forwarded(client, "answered") == drawn["there"]
        assert forwarded(client, "failed") == forwarded(client, "late") == 0
        timed = f'arm="{NAME}/there",route="/v1/recommend"'
        assert timed in client.get("/metrics").text


def test_items_that_only_the_other_server_knows_are_ranked(folder, there):
    user = next(user for user in there.users if SPLIT.assign(user).arm == "there")
    body = {"user": {"id": user}, "candidates": [{"item_id": item} for item in DROPPED]}
    with server(folder, there, use="rank") as client:
        answer = client.post("/v1/rank", json=body).json()
        assert answer["experiment"]["arm"] == "there"
        assert sorted(ids(answer)) == DROPPED and answer["missing_item_ids"] == []
        own = client.post("/v1/rank", json=body, headers={"x-recserve-untracked": "test"}).json()
        assert sorted(own["missing_item_ids"]) == DROPPED


def test_interleaved_slates_have_items_of_both_servers(folder, there):
    with server(folder, there, "interleaved") as client:
        for user in there.users[:12]:
            answer = ask(client, user)
            by_team = {"here": ids(alone(client, user)), "there": ids(alone(there, user))}
            for item in answer["items"]:
                assert item["item_id"] in by_team[item["team"]]
            assert {item["team"] for item in answer["items"]} == {"here", "there"}
        assert counts(client) == {"here": (12, 0), "there": (12, 0)}


def test_the_kill_switch_ends_the_forwarding(folder, there):
    admin = "an-admin-key-of-24-chars"
    user = next(user for user in there.users if SPLIT.assign(user).arm == "there")
    with server(folder, there, admin_keys=[admin]) as client:
        path, headers = f"/admin/experiments/{NAME}:stop", {"authorization": f"Bearer {admin}"}
        assert client.post(path, headers=headers).status_code == 200
        answer = ask(client, user)
        assert answer["model_version"] == versions(client)[0]
        assert answer["experiment"]["reason"] == "stopped"
        assert forwarded(client, "answered") == 0


def test_the_token_belongs_to_the_server_that_the_client_asked(folder, there):
    user = next(user for user in there.users if SPLIT.assign(user).arm == "there")
    with server(folder, there) as client:
        answer = ask(client, user)
        event = {
            "user_id": user,
            "item_id": ids(answer)[0],
            "type": "click",
            "timestamp": "2026-11-01T00:00:00Z",
            "attribution_token": answer["attribution_token"],
        }
        forged = {**event, "attribution_token": alone(there, user)["attribution_token"]}
        added = client.post("/v1/events", json={"events": [event, forged]})
        assert added.status_code == 200, added.text
        assert [one["index"] for one in added.json()["unattributed"]] == [1]
