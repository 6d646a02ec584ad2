"""The modes paired, shadow and interleaved of a live server, with and without faults."""

import asyncio
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

from msgspec import structs

from recserve.schemas.items import RecommendRequest, UserRef
from recserve.server.experiments import _is_empty, _ItemRequest
from recserve.service import Service
from recserve.service.recommend import RecommendService
from tests.support.experiment_client import K, arms, ask, ids, metric
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle
from tests.support.waiting import until

ARMS = [
    {"name": "wide", "fields": {"strategy": "beam", "beam_width": 40}},
    {"name": "narrow", "fields": {"strategy": "nezha", "beam_width": 10}},
]


@contextmanager
def server(store, mode, **more):
    service = Service.open(shared_bundle(), f"lmdb:{store}", "cpu")
    one = {"name": "m", "use": "recommend", "mode": mode, "arms": ARMS, "guard": None}
    with live(service, experiments=[one], **more) as client:
        client.users = client.get("/playground/samples").json()["users"]
        yield client


def plain(client, user, arm):
    return ids(ask(client, user, **ARMS[arm]["fields"]))


def compared(client, name):
    return metric(client, f"compared_{name}", experiment="m")


@contextmanager
def failing(monkeypatch, strategy, late=False):
    """Requests of a strategy fail, at once or when they finish."""
    error = RuntimeError("injected")
    real = RecommendService.begin

    def refuse(_):
        raise error

    def begin(self, body, request_id, deadline_s, client):
        if body.strategy != strategy:
            return real(self, body, request_id, deadline_s, client)
        if not late:
            raise error
        return replace(real(self, body, request_id, deadline_s, client), finish=refuse)

    with monkeypatch.context() as patch:
        patch.setattr(RecommendService, "begin", begin)
        yield


def test_paired_answers_as_the_control_and_measures_both(tmp_path, monkeypatch):
    with server(tmp_path, "paired") as client:
        for user in client.users:
            answer = ask(client, user)
            assert answer["experiment"]["arm"] == "wide"
            assert answer["experiment"]["mode"] == "paired"
            assert ids(answer) == plain(client, user, 0)
        found, count = arms(client), len(client.users)
        assert found["wide"]["requests"] == found["narrow"]["requests"] == count
        assert found["wide"]["p50_ms"] > 0 and found["narrow"]["p50_ms"] > 0
        assert compared(client, "answers") == count
        assert 0 < compared(client, "shared") <= count
        for late in (False, True):
            with failing(monkeypatch, "nezha", late=late):
                for user in client.users[:10]:
                    assert ids(ask(client, user)) == plain(client, user, 0)
        found = arms(client)
        assert found["narrow"]["errors"] == 20 and found["wide"]["errors"] == 0
        assert compared(client, "answers") == count


def test_a_treatment_that_hangs_does_not_take_the_control_along(tmp_path, monkeypatch):
    real = RecommendService.begin

    def begin(self, body, request_id, deadline_s, client):
        work = real(self, body, request_id, deadline_s, client)
        return replace(work, futures=[Future()]) if body.strategy == "nezha" else work

    with server(tmp_path, "paired") as client:
        monkeypatch.setattr(RecommendService, "begin", begin)
        for n, user in enumerate(client.users[:2]):
            answer = ask(client, user, timeout_ms=1500, request_id=f"r-{n}")
            assert ids(answer) == plain(client, user, 0)
        found = arms(client)
        assert found["wide"]["requests"] == 2 and found["wide"]["errors"] == 0
        # In r-1 it is the second of its pair and fails; in r-0 it is the first, with half the time.
        assert found["narrow"]["errors"] == compared(client, "dropped") == 1


def test_interleaved_without_the_treatment_is_the_slate_of_the_control(tmp_path, monkeypatch):
    """Also if the treatment hangs until the deadline; it is then an error of the arm."""
    real = RecommendService.begin

    def begin(self, body, request_id, deadline_s, client):
        work = real(self, body, request_id, deadline_s, client)
        return replace(work, futures=[Future()]) if body.strategy == "nezha" else work

    with server(tmp_path, "interleaved") as client:
        monkeypatch.setattr(RecommendService, "begin", begin)
        answer = ask(client, client.users[0], timeout_ms=1000)
        assert ids(answer) == plain(client, client.users[0], 0)
        assert "team" not in answer["items"][0]
        found = arms(client)
        assert (found["wide"]["errors"], found["narrow"]["errors"]) == (0, 1)


def test_paired_without_the_control_is_an_error(tmp_path, monkeypatch):
    with server(tmp_path, "paired") as client, failing(monkeypatch, "beam"):
        body = {"user": {"id": client.users[0]}, "k": K}
        assert client.post("/v1/recommend", json=body).status_code == 500
        assert arms(client)["wide"]["errors"] == 1


def wait_for_copies(client, count):
    until(lambda: arms(client)["narrow"]["requests"] + compared(client, "dropped") >= count)


def test_a_shadow_copy_is_never_returned(tmp_path, monkeypatch):
    with server(tmp_path, "shadow") as client:
        for user in client.users:
            answer = ask(client, user)
            assert answer["experiment"]["arm"] == "wide" and "team" not in answer["items"][0]
            assert ids(answer) == plain(client, user, 0)
        wait_for_copies(client, len(client.users))
        found = arms(client)
        assert found["wide"]["requests"] == len(client.users)
        assert compared(client, "answers") == found["narrow"]["requests"] > 0
        before, sent = found["narrow"]["errors"], len(client.users)
        with failing(monkeypatch, "nezha", late=True):
            for user in client.users[:10]:
                assert ids(ask(client, user)) == plain(client, user, 0)
            wait_for_copies(client, sent + 10)
        assert arms(client)["narrow"]["errors"] > before
        assert arms(client)["wide"]["errors"] == 0


def test_shadow_copies_are_dropped_while_requests_wait(tmp_path):
    with server(tmp_path, "shadow") as client:
        exchange_copies = compared(client, "dropped")
        engine = client.app.state.lifecycle.service.engine
        real = engine.stats
        engine.stats = lambda: replace(real(), queue_depth=3)
        ask(client, client.users[0])
        assert compared(client, "dropped") == exchange_copies + 1
        assert arms(client)["narrow"]["requests"] == 0


def test_interleaved_slates_name_the_team_of_each_item(tmp_path, monkeypatch):
    with server(tmp_path, "interleaved") as client:
        first = set()
        for user in client.users:
            answer = ask(client, user, request_id=f"r-{user}")
            by_team = {"wide": plain(client, user, 0), "narrow": plain(client, user, 1)}
            assert [item["rank"] for item in answer["items"]] == list(range(1, K + 1))
            assert len(set(ids(answer))) == K and answer["exact"] is False
            for item in answer["items"]:
                assert item["item_id"] in by_team[item["team"]]
            teams = [item["team"] for item in answer["items"]]
            assert teams.count("wide") == teams.count("narrow") == K // 2
            assert ids(ask(client, user, request_id=f"r-{user}")) == ids(answer)
            first.add(teams[0])
            label = answer["experiment"]
            assert (label["arm"], label["mode"]) == (None, "interleaved")
        assert first == {"wide", "narrow"}
        capped = ask(client, client.users[0], diversity={"category": 2})
        assert capped["experiment"]["reason"].startswith("the request sets diversity")
        with failing(monkeypatch, "nezha"):
            answer = ask(client, client.users[0])
            assert "team" not in answer["items"][0] and answer["strategy"] == "beam"


def test_a_list_is_not_an_empty_answer(tmp_path):
    """`popular` and `latest` ask no model. A slate of a model that only holds filling is empty."""
    with closing(Service.open(shared_bundle(), f"lmdb:{tmp_path}", "cpu")) as service:
        (user,) = service.samples(1, 1)["users"]
        for strategy in ("popular", "latest", "beam"):
            body = RecommendRequest(user=UserRef(id=user), strategy=strategy)
            answer = service.recommend(body)
            assert not _is_empty(answer)
        filled = [structs.replace(item, source="popular") for item in answer.items]
        assert _is_empty(structs.replace(answer, items=filled))


def test_a_shadow_copy_does_not_run_on_a_replaced_service():
    """The caches of a replaced service are empty, and stay so."""
    state = SimpleNamespace(lifecycle=SimpleNamespace(service="new"), default_timeout_ms=100)
    context = SimpleNamespace(state=state, service="old")
    request = _ItemRequest(None, context, None, None, "r", 0.0)
    asyncio.run(request.copy(SimpleNamespace(arms=[None, None]), []))
