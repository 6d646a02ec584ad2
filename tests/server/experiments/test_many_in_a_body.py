"""Several requests in one body have the bounds and names that they have without experiments."""

import random

import pytest

from recserve.service import fields
from tests.support.live_catalogues import opened
from tests.support.live_server import live


def asked(draw, items):
    """Returns a body of rankings, some with an id, a time limit or a fault of their own."""
    rankings = []
    for number in range(draw.randint(2, 6)):
        chosen = draw.sample(items, 4)
        one = {"history": chosen[:1], "candidates": [{"item_id": item} for item in chosen]}
        more = [{}, {"request_id": f"own-{number}"}, {"timeout_ms": 50_000}, {"sort_by": "none"}]
        rankings.append(one | draw.choice(more))
    return {"requests": rankings, "timeout_ms": 60_000, "request_id": "of-all"}


@pytest.mark.parametrize("uses", [("rank",), ("recommend",), ()])
def test_answers_are_named_and_bounded_alike(tmp_path, uses, monkeypatch):
    arms = [{"name": "a"}, {"name": "b"}]
    experiments = [{"name": use, "use": use, "arms": arms} for use in uses]
    settings = {"experiments": experiments, "experiments_dir": tmp_path / "counts"}
    with opened(tmp_path) as service, live(service, **settings) as client:
        items = service.samples(0, 20)["items"]
        draw = random.Random(str(uses))
        for _ in range(4):
            body = asked(draw, items)
            said = client.post("/v1/rank:batch", json=body)
            assert said.status_code == 200, said.text
            results = said.json()["results"]
            for number, (one, result) in enumerate(zip(body["requests"], results, strict=True)):
                if one.get("sort_by") == "none":
                    assert result["error"]["param"].endswith("sort_by")
                    continue
                name = one.get("request_id", f"of-all.{number}")
                assert result["answer"]["request_id"] == name
                label = result["answer"].get("experiment")
                assert (label is not None) == ("rank" in uses)
        monkeypatch.setattr(fields, "MAX_FIELD_VALUES", 7)
        ranking = asked(draw, items)["requests"][0] | {"fields": ["title"]}
        ranking.pop("sort_by", None)
        refused = client.post("/v1/rank:batch", json={"requests": [ranking] * 2})
        assert refused.status_code == 422, refused.text
        assert "items times fields, got 8" in refused.json()["error"]["message"]
