"""The Open Inference Protocol: metadata, tensors in and out, bounds and errors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import httpx
import pytest

from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


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


def test_described_outputs_are_those_that_come(server):
    candidates = tensor("candidates", [2, 2], ITEMS[:4])
    for name, inputs in (("recommend", [USERS]), ("rank", [USERS, candidates])):
        said = server.get(f"/v2/models/{name}").json()["outputs"]
        found = outputs(infer(server, name, *inputs))
        assert {one["name"]: one["datatype"] for one in said} == {
            key: one["datatype"] for key, one in found.items()
        }


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
