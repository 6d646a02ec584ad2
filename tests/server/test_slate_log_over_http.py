"""Slates and outcomes of a running server."""

import itertools

import pytest

from recserve.config import ConfigError, ServerConfig
from recserve.server.app import create_app
from recserve.service.slate_log.reader import read_log, shown_items
from tests.support.live_catalogues import opened
from tests.support.live_server import live


def test_slates_and_their_outcomes_are_logged(tmp_path):
    log = tmp_path / "slates"
    with (
        opened(tmp_path) as service,
        live(service, slate_log=log, slate_log_rotate_s=3600) as client,
    ):
        item = service.samples(0, 1)["items"][0]
        event = {"user_id": "anna", "item_id": item, "type": "click", "event_id": "e0"}
        assert client.post("/v1/events", json={"events": [event]}).json()["accepted"] == 1
        for user in ("anna", "ben"):
            response = client.post("/v1/recommend", json={"user": {"id": user}, "k": 4})
            slate = response.json()
            shown = slate["items"][1]["item_id"]
            token = slate["attribution_token"]
            event = {"user_id": user, "item_id": shown, "attribution_token": token}
            said = client.post("/v1/events", json={"events": [event]}).json()
            assert said["accepted"] == 1 and "unattributed" not in said
        wrong = client.post("/v1/events", json={"events": [event | {"user_id": "eve"}]}).json()
        assert wrong["accepted"] == 1 and wrong["unattributed"][0]["index"] == 0
        assert client.delete("/v1/users/ben").status_code == 204
        page = client.get("/metrics").text
        assert 'recserve_slate_log_dropped_total{reason="queue_full"} 0.0' in page
    table = shown_items(log)
    assert table.num_rows == 4
    first = read_log(log, "slates").to_pylist()[0]
    assert first["strategy"] != "popular" and len(first["items"]) == 4
    assert all(row["score"] is not None for row in first["items"])
    assert table.column("num_outcomes").to_pylist() == [0, 1, 0, 0]
    assert "anna" not in str(table.to_pylist())


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
