"""The server on a real redis-server: the same answers, and what is left of them when Redis dies."""

from recserve.service import Service
from recserve.service.options import ServiceOptions
from tests.support.live_server import live
from tests.support.redis_server import start_redis
from tests.support.tiny_bundle import shared_bundle


def test_redis_comes_and_goes(tmp_path):
    redis, port = start_redis(tmp_path)
    options = ServiceOptions(journal=tmp_path / "items")
    service = Service.open(shared_bundle(), f"redis://127.0.0.1:{port}/0", "cpu", options)
    assert service.histories.store.blocks
    samples = service.samples(2, 5)
    user, item = samples["users"][0], samples["items"][0]
    body = {"user": {"id": user}, "k": 5, "exclude": {"seen": False}}
    event = {"events": [{"user_id": user, "item_id": item, "event_id": "e1"}]}
    try:
        with live(service) as client:
            before = client.post("/v1/recommend", json=body).json()
            assert before["degraded"] == [] and before["strategy"] == "speculative"
            assert client.post("/v1/events", json=event).json()["accepted"] == 1
            after = client.post("/v1/recommend", json=body).json()
            assert [i["score"] for i in after["items"]] != [i["score"] for i in before["items"]]

            redis.kill()
            redis.wait()
            popular = client.post("/v1/recommend", json=body)
            assert popular.status_code == 200
            assert popular.json()["degraded"] == ["history_unavailable", "cold_start"]
            inline = client.post("/v1/recommend", json={**body, "history": [item]}).json()
            assert inline["degraded"] == [] and inline["strategy"] == "speculative"
            ranked = client.post(
                "/v1/rank", json={"user": {"id": user}, "candidates": [{"item_id": item}]}
            ).json()
            assert ranked["degraded"] == ["history_unavailable", "cold_start"]
            for refused in (
                client.post("/v1/events", json=event),
                client.get(f"/v1/users/{user}/history"),
                client.delete(f"/v1/users/{user}"),
            ):
                assert refused.status_code == 503 and refused.headers["Retry-After"]
                assert refused.json()["error"]["code"] == "history_unavailable"
                assert "127.0.0.1" not in refused.text and str(port) not in refused.text
            assert client.get("/health/ready").status_code == 200

            redis, _ = start_redis(tmp_path, port)
            assert client.post("/v1/events", json=event).json()["accepted"] == 1
            back = client.post("/v1/recommend", json=body).json()
            assert back["degraded"] == [] and back["strategy"] == "speculative"
    finally:
        redis.kill()
        redis.wait()
