"""The Open Inference Protocol: metadata, tensors in and out, bounds and errors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import httpx
import pytest

from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle, tiny_bundle


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[httpx.Client]:
    store = f"lmdb:{tmp_path_factory.mktemp('v2')}/store"
    with live(Service.open(shared_bundle(), store, "cpu")) as client:
        yield client


def tensor(name: str, shape: list[int], data: list, datatype: str = "BYTES") -> dict:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


USERS = tensor("user_id", [2], ["user000001", "user000002"])
ITEMS = [f"item{number:06d}" for number in range(20)]


def infer(server: httpx.Client, name: str, *inputs: dict, **fields: object) -> httpx.Response:
    return server.post(f"/v2/models/{name}/infer", json={"inputs": list(inputs), **fields})


def outputs(answer: httpx.Response) -> dict[str, dict]:
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["outputs"]}


def test_metadata_describes_server_and_models(server):
    assert server.get("/v2").json()["name"] == "recserve"
    assert server.head("/v2").status_code == 200
    for name, key in (("recommend", "item_id"), ("rank", "rank")):
        assert server.get(f"/v2/models/{name}/ready").json() == {"name": name, "ready": True}
        said = server.get(f"/v2/models/{name}").json()
        assert said["name"] == name and said["platform"] == "recserve"
        assert key in {one["name"] for one in said["outputs"]}
        assert said["versions"] == [server.get("/version").json()["model_version"]]
    for path in ("/v2/models/nothing", "/v2/models/nothing/ready"):
        answer = server.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"] == "expected one of recommend, rank, got 'nothing'"


def test_described_outputs_are_those_that_come(server):
    candidates = tensor("candidates", [2, 2], ITEMS[:4])
    for name, inputs in (("recommend", [USERS]), ("rank", [USERS, candidates])):
        said = server.get(f"/v2/models/{name}").json()["outputs"]
        found = outputs(infer(server, name, *inputs))
        assert {one["name"]: one["datatype"] for one in said} == {
            key: one["datatype"] for key, one in found.items()
        }


def test_rows_of_a_batch_are_the_single_answers(server):
    k = tensor("k", [1], [4], "INT64")
    histories = tensor("history", [2, 3], [[ITEMS[1], ITEMS[2], ITEMS[3]], [ITEMS[5], "", ""]])
    parameters = {"strategy": "beam"}
    found = outputs(infer(server, "recommend", histories, k, parameters=parameters))
    assert found["item_id"]["shape"] == [2, 4]
    for row, history in enumerate((ITEMS[1:4], ITEMS[5:6])):
        body = {"history": history, "k": 4, "strategy": "beam"}
        alone = server.post("/v1/recommend", json=body).json()["items"]
        part = slice(4 * row, 4 * row + 4)
        assert found["item_id"]["data"][part] == [item["item_id"] for item in alone]


def test_unknown_candidates_have_no_score(server):
    candidates = tensor("candidates", [2, 2], [[ITEMS[1], "nothing"], [ITEMS[2], ""]])
    found = outputs(infer(server, "rank", USERS, candidates, id="r-9"))
    assert found["rank"]["data"] == [1, 0, 1, 0]
    scores = next(one for one in found.values() if one["datatype"] == "FP32")
    assert [score is None for score in scores["data"]] == [False, True, False, True]


def test_outputs_can_be_chosen_and_the_id_is_echoed(server):
    answer = infer(server, "recommend", USERS, id="my-id", outputs=[{"name": "item_id"}])
    assert list(outputs(answer)) == ["item_id"]
    assert answer.json()["id"] == "my-id" and answer.headers["x-request-id"] == "my-id"
    answer = infer(server, "recommend", USERS, outputs=[{"name": "itemid"}])
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("outputs[0].name: expected one of item_id")
    answer = infer(server, "recommend", USERS, outputs=[{"name": "item_id"}] * 2)
    assert answer.json() == {"error": "outputs: expected each output once"}


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        ("recommend", [tensor("user", [1], ["u"])], "inputs[0].name: expected one of user_id"),
        ("recommend", [tensor("user_id", [1], ["u"], "FP32")], "expected BYTES"),
        ("recommend", [tensor("user_id", [2], ["u"])], "expected 2 values"),
        ("recommend", [tensor("user_id", [1], [7])], "expected text, got '7'"),
        ("recommend", [USERS, tensor("history", [1, 1], ["x"])], "either user_id or history"),
        ("recommend", [USERS, tensor("k", [1], [0], "INT64")], "k: expected int >= 1"),
        ("recommend", [USERS, tensor("k", [2], [1, 2], "INT64")], "expected one integer"),
        ("recommend", [USERS, USERS], "user_id occurs twice"),
        ("recommend", [tensor("user_id", [257], ["u"] * 257)], "expected 1 to 256 rows, got 257"),
        ("recommend", [tensor("user_id", [0], [])], "expected 1 to 256 rows, got 0"),
        ("recommend", [tensor("history", [3], ["a", "b", "c"])], "expected two dimensions"),
        (
            "rank",
            [USERS, tensor("candidates", [2, 2], [["a"], ["b", "c", "d"]])],
            "inputs.candidates.data: expected 2 rows of 2 values for the shape, got 2 of 1, 3",
        ),
        ("recommend", [tensor("history", [2, 3], [["a", "b"]] * 3)], "got 3 of 2, 2, 2"),
        ("recommend", [tensor("history", [1, 2], ["a", ["b"]])], "got 2 of a single value, 1"),
        ("recommend", [tensor("history", [1, 2], [["a", "b"]] + [[]] * 9)], "got 10 of 2, 0, 0"),
        ("recommend", [tensor("history", [1, 2], [[["a"], ["b"]]])], "expected text, got"),
        ("recommend", [tensor("user_id", [2], [["a", "b"]])], "expected 2 values"),
        ("recommend", [tensor("user_id", [2], [["a"], ["b"]])], "expected text, got \"['a']\""),
        ("rank", [USERS], "candidates is required"),
        ("rank", [USERS, tensor("candidates", [1, 1], ["x"])], "1 rows; expected 2"),
        ("rank", [USERS, tensor("candidates", [2, 1], ["", ""])], "candidates: expected"),
    ],
)
def test_bad_tensors_name_the_field_and_the_bound(server, model, inputs, words):
    answer = infer(server, model, *inputs)
    assert answer.status_code == 422, answer.text
    assert words in answer.json()["error"]


def test_unknown_parameters_are_refused(server):
    answer = infer(server, "recommend", USERS, parameters={"strateg": "beam"})
    assert answer.status_code == 422 and "did you mean strategy?" in answer.text
    answer = infer(server, "recommend", USERS, parameters={"strategy": "nothing"})
    assert answer.status_code == 422 and answer.json()["error"].startswith("strategy: ")


def test_a_bundle_without_a_recommender_answers_with_its_list(tmp_path):
    bundle = tiny_bundle(tmp_path, recommender=False)
    with live(Service.open(bundle, f"lmdb:{tmp_path}/store", "cpu")) as server:
        assert server.get("/v2/models/recommend/ready").status_code == 200
        assert infer(server, "recommend", USERS).status_code == 200
        assert server.get("/v2/models/rank/ready").status_code == 200


@pytest.mark.parametrize("seed", range(8))
def test_scores_stand_at_the_places_of_their_candidates(server, seed):
    """Padding anywhere in a row moves nothing, neither there nor in a history."""
    rng = random.Random(seed)
    count, width = rng.randint(1, 3), rng.randint(2, 6)
    plain = [rng.sample(ITEMS, rng.randint(1, width - 1)) for _ in range(count)]
    rows = []
    for items in plain:
        places = sorted(rng.sample(range(width), len(items)))
        row = [""] * width
        for place, item in zip(places, items, strict=True):
            row[place] = item
        rows.append(row)
    users = tensor("user_id", [count], [f"user{number:06d}" for number in range(count)])
    ranks, click = {"name": "rank"}, {"name": "click"}
    candidates = tensor("candidates", [count, width], rows)
    found = outputs(infer(server, "rank", users, candidates, outputs=[ranks, click]))
    assert found["rank"]["shape"] == found["click"]["shape"] == [count, width]
    for number, (row, items) in enumerate(zip(rows, plain, strict=True)):
        user = tensor("user_id", [1], users["data"][number : number + 1])
        dense = tensor("candidates", [1, len(items)], items)
        alone = outputs(infer(server, "rank", user, dense, outputs=[ranks, click]))
        part = slice(number * width, (number + 1) * width)
        at = [bool(item) for item in row]
        assert [rank > 0 for rank in found["rank"]["data"][part]] == at
        assert [score is not None for score in found["click"]["data"][part]] == at
        for name in ("rank", "click"):
            values = itertools.compress(found[name]["data"][part], at)
            assert list(values) == pytest.approx(alone[name]["data"], rel=1e-5)
    history = tensor("history", [1, width], rows[0])
    short = tensor("history", [1, len(plain[0])], plain[0])
    slates = [outputs(infer(server, "recommend", one)) for one in (history, short)]
    assert slates[0]["item_id"] == slates[1]["item_id"]


def test_a_slate_tensor_has_k_columns(server):
    k = tensor("k", [1], [700], "INT64")
    found = outputs(infer(server, "recommend", USERS, k))
    assert found["item_id"]["shape"] == found["score"]["shape"] == [2, 700]
    assert found["item_id"]["data"][699] == "" and found["item_id"]["data"][0] != ""
