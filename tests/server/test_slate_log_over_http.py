"""Slates and outcomes of a running server."""

import itertools

import pytest

from recserve.config import ConfigError, ServerConfig
from recserve.server.app import create_app
from recserve.service.slate_log.reader import read_log
from tests.support.live_catalogues import opened
from tests.support.live_server import live


@pytest.mark.parametrize("route", ["/v1/recommend", "/v1/rank", "/v1/rank:batch"])
def test_untracked_requests_are_answered_and_leave_no_trace(tmp_path, route):
    """Of an answer and the event on it, only a pair of two unmarked requests counts."""
    log, mark = tmp_path / "slates", {"X-Recserve-Untracked": "my load tool"}
    one = {"name": "x", "use": "recommend", "arms": [{"name": "a"}, {"name": "b"}]}
    one["use"] = "recommend" if route == "/v1/recommend" else "rank"
    settings = {"experiments": [one], "slate_log": log, "experiments_dir": tmp_path / "counts"}
    with opened(tmp_path) as service, live(service, **settings) as client:
        items = service.samples(0, 1)["items"]

        def popular():
            return float(service.catalog.current.popularity.read()[0].sum())

        before = popular()
        for asked, clicked in itertools.product([{}, mark], repeat=2):
            body = {"history": items[:1]}
            if route == "/v1/recommend":
                body["k"] = 3
            else:
                body["candidates"] = [{"item_id": item} for item in items[:3]]
            if route == "/v1/rank:batch":
                body = {"requests": [body]}
            found = client.post(route, json=body, headers=asked).json()
            answer = found["results"][0]["answer"] if "results" in found else found
            assert answer["items"]
            token, item = answer["attribution_token"], answer["items"][0]["item_id"]
            event = {"user_id": "u", "item_id": item, "type": "click", "attribution_token": token}
            said = client.post("/v1/events", json={"events": [event]}, headers=clicked).json()
            assert said["accepted"] == 1 and "unattributed" not in said
        assert popular() == pytest.approx(before + 2, abs=0.01)  # of the unmarked events
        assert len(client.get("/v1/users/u/history").json()["events"]) == 4
        (state,) = client.get("/v1/experiments").json()["experiments"]
        assert sum(arm["answers"] for arm in state["arms"]) == 2
        assert sum(arm["goals"][0]["events"] for arm in state["arms"]) == 1
    slates = 2 * (route == "/v1/recommend")
    assert read_log(log, "slates").num_rows == slates
    assert read_log(log, "outcomes").num_rows == 2


def test_a_folder_that_cannot_be_used_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="slate_log: .*file cannot be used"):
        create_app(ServerConfig(bundle=tmp_path, slate_log=tmp_path / "file"))
    with pytest.raises(ValueError, match="slate_log: is for slates; set bundle too"):
        ServerConfig(llm=tmp_path, slate_log=tmp_path / "log")
