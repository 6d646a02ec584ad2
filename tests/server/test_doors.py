"""Every door of the service has the effects that the table in `service/effects.py` gives it."""

import random
import re

import pyarrow.parquet as pq
import pytest

from recserve.batch.together import together
from recserve.schemas.items import RecommendRequest, UserRef
from recserve.service import effects
from recserve.service.slate_log.reader import read_log
from recserve.service.slate_log.records import SCHEMAS
from tests.support.live_catalogues import opened
from tests.support.live_server import live

MARK = {"X-Recserve-Untracked": "a load tool"}
DOORS = ("/v1", "/v2", "Python", "batch, evaluation")
K = 3


def the_table():
    """Reads the table: whether an effect happens, by effect and door. None: there is no call."""
    table = re.findall(r"^    (\S.*\S)$", effects.__doc__, re.MULTILINE)
    head, *lines = [re.split(r" {2,}", line) for line in table]
    assert head == ["effect", *DOORS]
    answers = {"yes": True, "no": False, "-": None}
    return {
        (effect, door): answers[word]
        for effect, *words in lines
        for door, word in zip(DOORS, words, strict=True)
    }


class Door:
    """One way to call the service: a slate, an event, and a deletion."""

    def __init__(self, name, service, client, marked=False):
        self.name, self.service, self.client = name, service, client
        self.headers = MARK if marked else {}

    def post(self, path, body):
        said = self.client.post(path, json=body, headers=self.headers)
        assert said.status_code == 200, said.text
        return said.json()

    def recommend(self, user):
        """Returns the slate, where the door has one."""
        if self.name == "/v1":
            return self.post("/v1/recommend", {"user": {"id": user}, "k": K})
        if self.name == "/v2":
            inputs = [
                {"name": "user_id", "shape": [1], "datatype": "BYTES", "data": [user]},
                {"name": "k", "shape": [1], "datatype": "INT64", "data": [K]},
            ]
            return self.post("/v2/models/recommend/infer", {"inputs": inputs})
        body = RecommendRequest(user=UserRef(id=user), k=K)
        if self.name == "Python":
            return self.service.recommend(body)
        return together(self.service)([body])[0]

    def add(self, event):
        if self.name == "/v1":
            assert self.post("/v1/events", {"events": [event]})["accepted"] == 1
        else:
            assert self.service.add_events({"events": [event]}).accepted == 1

    def forget(self, user):
        if self.name == "/v1":
            assert self.client.delete(f"/v1/users/{user}").status_code == 204
        else:
            self.service.delete_user(user)


def rounds(client):
    """Returns the number of slates whose rounds are counted."""
    name = "recserve_recommend_rounds_count "
    (line,) = [x for x in client.get("/metrics").text.splitlines() if x.startswith(name)]
    return float(line.removeprefix(name))


def counts(client, key):
    """Returns a count of the experiment over its arms."""
    (state,) = client.get("/v1/experiments").json()["experiments"]
    if key == "answers":
        return sum(arm["answers"] for arm in state["arms"])
    return sum(goal["events"] for arm in state["arms"] for goal in arm["goals"])


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", DOORS)
def test_a_door_has_the_effects_of_the_table(tmp_path, name, marked):
    """Slates to `seer`, an event of `clicker`, a deletion of `leaver`, through one door."""
    if marked and not name.startswith("/"):
        pytest.skip("only HTTP marks requests")
    log, clock = tmp_path / "slates", []
    one = {"name": "x", "use": "recommend", "arms": [{"name": "a"}, {"name": "b"}]}
    one["goals"] = ["click"]
    settings = {"experiments": [one], "slate_log": log, "experiments_dir": tmp_path / "counts"}
    settings["event_log"] = events = tmp_path / "events"
    expected = {effect: word for (effect, door), word in the_table().items() if door == name}
    with opened(tmp_path) as service, live(service, **settings) as client:
        signer, chooser = service.signer, service.recommender.chooser
        seer, clicker, leaver = random.sample(service.samples(20, 0)["users"], 3)
        plain, door = Door("/v1", service, client), Door(name, service, client, marked)
        seen = plain.recommend(clicker)
        plain.recommend(leaver)
        left = {"user_id": leaver, "item_id": service.samples(0, 1)["items"][0]}
        plain.add(left)
        choose = chooser.choose
        chooser.choose = lambda *given: clock.append(1) or choose(*given)
        before = rounds(client), counts(client, "answers")
        door.recommend(seer)
        found = {
            "rounds are counted": rounds(client) > before[0],
            "an experiment draws the arm": counts(client, "answers") > before[1],
            "the clock may choose for `auto`": bool(clock),
        }
        if expected["outcomes are logged and counted"] is not None:
            item, token = seen["items"][0]["item_id"], seen["attribution_token"]
            event = {"user_id": clicker, "item_id": item, "type": "click"}
            door.add(event | {"attribution_token": token})
        if expected["a deletion reaches the logs"] is not None:
            door.forget(leaver)
        clicks = counts(client, "events")
    users = {kind: read_log(log, kind).column("user").to_pylist() for kind in SCHEMAS}
    found["slates are logged"] = signer.user(seer) in users["slates"]
    outcomes = users["outcomes"].count(signer.user(clicker))
    assert outcomes == clicks
    found["outcomes are logged and counted"] = bool(outcomes)
    logged = [pq.read_table(path).column("user_id").to_pylist() for path in events.iterdir()]
    logged = sum(logged, [])
    found["events are logged"] = clicker in logged
    gone = signer.user(leaver) not in users["slates"]
    assert gone == (leaver not in logged)
    found["a deletion reaches the logs"] = gone
    always = {"rounds are counted", "the clock may choose for `auto`"}
    always.add("a deletion reaches the logs")
    wanted = {
        effect: bool(word) and (not marked or effect in always) for effect, word in expected.items()
    }
    assert found == wanted
