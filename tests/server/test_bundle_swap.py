"""The admin routes replace the bundle of a server under load."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from recserve.bundle.bundle import Bundle
from recserve.config import ServerConfig
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.items import RankRequest, RecommendRequest, UserRef
from recserve.schemas.validation import to_message
from recserve.server import lifecycle as lifecycle_module
from recserve.server.lifecycle import CLOSE, Lifecycle
from recserve.server.loader import ServiceLoader
from recserve.service import Service, ServiceOptions, replacement
from tests.support.bundle_shelf import shelf
from tests.support.grids import covering
from tests.support.live_server import COLLECTOR, live
from tests.support.redis_server import free_port
from tests.support.waiting import until

KEY = "an-admin-key-of-some-length"
ADMIN = {"Authorization": f"Bearer {KEY}"}
SETTINGS = {"device": "cpu", "kv_bytes": 2**22}
HISTORIES = [[f"item{number:06d}" for number in numbers] for numbers in ((1, 2), (9, 4, 30), (77,))]
CANDIDATES = [{"item_id": f"item{number:06d}"} for number in range(40, 60)]
REQUESTS = [
    *(("/v1/recommend", {"history": h, "k": 8, "strategy": "beam"}) for h in HISTORIES),
    *(("/v1/recommend", {"history": h, "k": 8, "strategy": "speculative"}) for h in HISTORIES),
    ("/v1/recommend", {"user": {"id": "user000001"}, "k": 8, "strategy": "nezha"}),
    *(("/v1/rank", {"history": h, "candidates": CANDIDATES}) for h in HISTORIES),
    ("/v1/rank", {"history": HISTORIES[1], "candidates": CANDIDATES, "scorer": "likelihood"}),
]


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    return shelf(tmp_path)


def opened(bundles: Path, name: str, store: str = "served") -> Service:
    options = ServiceOptions(engine=EngineConfig(kv_bytes=2**22), journal=bundles / ".items")
    return Service.open(bundles / name, f"lmdb:{bundles.parent}/{store}", "cpu", options)


@pytest.fixture
def server(bundles: Path) -> Iterator[httpx.Client]:
    settings = {**SETTINGS, "bundles_dir": bundles, "admin_keys": [KEY]}
    with live(opened(bundles, "one"), **settings) as client:
        yield client


def begin(server: httpx.Client, name: str) -> httpx.Response:
    return server.post("/admin/bundle:load", json={"path": name}, headers=ADMIN)


def status(server: httpx.Client) -> dict:
    return server.get("/admin/bundle", headers=ADMIN).json()


def ended(server: httpx.Client) -> dict:
    """Waits for the replacement; returns its status."""
    end = time.monotonic() + 60
    while (found := status(server))["state"] == "loading":
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def loaded(server: httpx.Client, name: str) -> dict:
    answer = begin(server, name)
    assert answer.status_code == 202, answer.text
    found = ended(server)
    assert found["state"] == "ready" and found["current"]["path"] == name, found
    return found


def content(answer: dict) -> list:
    """Items and scores, rounded to what the order of additions does not change."""
    scores = [item.get("scores") or {"score": item["score"]} for item in answer["items"]]
    rounded = [{name: round(score, 3) for name, score in s.items()} for s in scores]
    return [(item["item_id"], score) for item, score in zip(answer["items"], rounded, strict=True)]


def wanted(bundles: Path) -> dict[str, list]:
    """What each bundle answers to REQUESTS, by its model version."""
    answers = {}
    for name in ("one", "two", "other"):
        with opened(bundles, name, f"alone-{name}") as service:
            found = []
            for path, body in REQUESTS:
                kind = RankRequest if path == "/v1/rank" else RecommendRequest
                call = service.rank if kind is RankRequest else service.recommend
                answer = call(to_message(body, kind))
                items = [item.item_id for item in answer.items]
                found.append((items, answer.catalog_version.partition(".")[0]))
            answers[service.versions()["model_version"]] = found
    return answers


def test_requests_during_swaps_get_one_bundles_answer_and_no_error(server, bundles):
    expected = wanted(bundles)
    stop = threading.Event()
    wrong: list[object] = []
    seen: list[str] = []

    def load(first: int) -> None:
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            number = first
            while not stop.is_set():
                path, body = REQUESTS[number % len(REQUESTS)]
                answer = client.post(path, json=body)
                if answer.status_code != 200:
                    wrong.append(answer.text)
                    continue
                said = answer.json()
                version = said["model_version"]
                items = [item["item_id"] for item in said["items"]]
                catalogue = said["catalog_version"].partition(".")[0]
                if (items, catalogue) != expected[version][number % len(REQUESTS)]:
                    wrong.append((number % len(REQUESTS), version, catalogue, items))
                seen.append(version)
                number += 1
                time.sleep(0.05)

    def engines() -> int:
        return sum(thread.name == "engine" for thread in threading.enumerate())

    running = engines()
    old_engines: list[weakref.ref[Engine]] = []
    threads = [threading.Thread(target=load, args=(number * 3,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for name in ("two", "other", "one"):
            count = len(seen)
            old_engines.append(weakref.ref(server.app.state.lifecycle.service.engine))
            loaded(server, name)
            while len(seen) < count + 16 and not wrong:
                time.sleep(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert set(seen) == set(expected)
    assert engines() == running + 1  # the one that a rollback needs
    server.app.state.lifecycle.predecessor.drop()
    assert engines() == running
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    # The fixture itself holds the first service, which it has given to the server.
    assert [ref() is None for ref in old_engines[1:]] == [True] * 2
    counted = server.get("/metrics").text
    assert 'recserve_bundle_swaps_total{result="loaded"} 3.0' in counted


def test_the_kept_service_has_no_cached_prefix_and_is_closed_before_another_is_opened(server):
    lifecycle = server.app.state.lifecycle
    first = lifecycle.service
    server.post("/v1/recommend", json=REQUESTS[0][1])
    assert first.gauges().kv_pages["cached"] > 0
    loaded(server, "other")
    assert first.alive and first.gauges().kv_pages["cached"] == 0
    loaded(server, "two")
    assert not first.alive and lifecycle.service.alive


def test_a_rollback_to_a_bundle_that_was_replaced_is_refused(server, bundles):
    loaded(server, "two")
    (bundles / "one").rename(bundles / "away")
    refused = server.post("/admin/bundle:rollback", headers=ADMIN)
    assert refused.status_code == 409 and "has changed or is gone" in refused.text
    (bundles / "other").rename(bundles / "one")
    assert server.post("/admin/bundle:rollback", headers=ADMIN).status_code == 409


def damage(path: Path) -> None:
    """Flips one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_a_damaged_bundle_is_refused_and_the_old_one_answers(server, bundles):
    before = server.post("/v1/recommend", json=REQUESTS[0][1]).json()
    damage(bundles / "two" / "ranker" / "model.safetensors")
    (bundles / "other" / "manifest.json").write_text("{}")
    (bundles / "later").mkdir()
    for name, words in (("two", "sha256"), ("other", "manifest.json")):
        assert begin(server, name).status_code == 202
        found = ended(server)
        assert found["state"] == "failed" and words in found["message"], found
        assert str(bundles) not in found["message"]
        assert found["current"]["path"] == "one" and found["previous"] is None
    after = server.post("/v1/recommend", json=REQUESTS[0][1]).json()
    assert content(after) == content(before)
    assert after["model_version"] == before["model_version"]
    assert 'recserve_bundle_swaps_total{result="refused"} 2.0' in server.get("/metrics").text


def test_only_bundles_of_the_folder_can_be_named(server, bundles):
    outside = bundles.parent / "elsewhere"
    (bundles / "two").rename(outside)
    (bundles / "outside").symlink_to(outside)
    (bundles / "deep").symlink_to(bundles / "one" / "recommender")
    (bundles / "circle").symlink_to("circle")
    (bundles / "into-circle").symlink_to("circle/one")
    (bundles / "circular-manifest").mkdir()
    (bundles / "circular-manifest" / "manifest.json").symlink_to("manifest.json")
    (bundles / "long-link").symlink_to("x" * 300)
    refused = ("..", "../bundles/two", "one/recommender", "/etc", "", ".items")
    unknown = (
        "nothing",
        "outside",
        "deep",
        "circle",
        "into-circle",
        "circular-manifest",
        "long-link",
    )
    for name in (*refused, *unknown):
        answer = begin(server, name)
        assert answer.status_code == (422 if name in refused else 404), (name, answer.text)
    assert str(bundles.parent) not in answer.text
    assert status(server)["state"] == "ready"


def test_a_request_in_flight_finishes_on_the_old_bundle_and_blocks_a_second_load(server):
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            answers.append(client.post("/v1/recommend", json=REQUESTS[0][1]))

    old = server.get("/version").json()["model_version"]
    asking = threading.Thread(target=ask)
    with server.app.state.lifecycle.service.engine.held():
        asking.start()
        while not server.get("/metrics").text.count("recserve_queue_depth 1.0"):
            time.sleep(0.01)
        assert begin(server, "two").status_code == 202
        while server.get("/version").json()["model_version"] == old:
            time.sleep(0.01)
        new = server.post("/v1/recommend", json=REQUESTS[0][1]).json()
        assert new["model_version"] != old
        assert status(server)["state"] == "loading" and not answers
        second = begin(server, "other")
        assert second.status_code == 409 and second.json()["error"]["code"] == "bundle_conflict"
    asking.join()
    assert answers[0].status_code == 200 and answers[0].json()["model_version"] == old
    assert ended(server)["current"]["path"] == "two"


def test_without_a_folder_of_bundles_nothing_can_be_loaded(bundles):
    with live(opened(bundles, "one"), admin_keys=[KEY], **SETTINGS) as server:
        answer = begin(server, "two")
    assert answer.status_code == 403 and "bundles_dir" in answer.json()["error"]["message"]


SERVE = """
import sys
from pathlib import Path
from recserve.config import ServerConfig
from recserve.server.run import serve
bundles, port = Path(sys.argv[1]), int(sys.argv[2])
config = ServerConfig(bundle=bundles / "current", bundles_dir=bundles, port=port, device="cpu",
                      threads=1, kv_bytes=2**22, drain_delay_s=0)
sys.exit(serve(config))
"""


@pytest.mark.slow
def test_the_command_reloads_on_sighup_and_uses_the_folders_of_bundles_dir(bundles):
    (bundles / "current").symlink_to("one")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(bundles), str(port)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )

    def version() -> str | None:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/version").json().get("model_version")
        except httpx.TransportError:
            return None

    def wait_for_version(wanted: str) -> None:
        end = time.monotonic() + 60
        while version() != wanted:
            assert time.monotonic() < end and server.poll() is None
            time.sleep(0.05)

    try:
        wait_for_version(Bundle.open(bundles / "one").manifest.model_version)
        (bundles / "current").unlink()
        (bundles / "current").symlink_to("two")
        server.send_signal(signal.SIGHUP)
        wait_for_version(Bundle.open(bundles / "two").manifest.model_version)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()
    assert (bundles / ".history").is_dir()


def engines() -> int:
    return sum(thread.name == "engine" for thread in threading.enumerate())


STAGES = ("Bundle.verify", "loader.successor", "probe", "hand_over", "lifecycle._publish")


@pytest.mark.parametrize(
    ("stage", "end"),
    [
        one
        for one in covering(STAGES, ("drain", "close", "fail"))
        if one.values != ("lifecycle._publish", "fail")  # the last stage cannot fail
    ],
)
def test_a_server_that_ends_during_a_swap_closes_what_it_has_opened(
    bundles, stage, end, monkeypatch
):
    """A signal, the end of the drain, or an error arrives at each stage of the swap.

    A request that has begun is answered by its service, with the history in the shared store.
    """
    before = engines()
    for module in (lifecycle_module, replacement):
        monkeypatch.setattr(module, "gc", COLLECTOR)
    config = ServerConfig(bundle=bundles / "one", bundles_dir=bundles, **SETTINGS)
    lifecycle = Lifecycle(ServiceLoader(config), Mock())
    lifecycle.start()
    assert lifecycle.loaded.wait(60)
    old, closing = lifecycle.service, threading.Thread(target=lifecycle.close)
    generation = lifecycle.enter()
    places = {"Bundle": Bundle, "loader": lifecycle.loader, "lifecycle": lifecycle}
    place, _, name = stage.rpartition(".")
    real = getattr(places.get(place, lifecycle_module), name)

    def interrupt(*given, **named):
        if end == "fail":
            raise ValueError("broken on purpose")
        lifecycle.draining = True
        if end == "close":
            closing.start()
            until(lambda: lifecycle._closing)
        return real(*given, **named)

    monkeypatch.setattr(places.get(place, lifecycle_module), name, interrupt)
    lifecycle.load("two")
    if end == "drain":
        until(lambda: lifecycle.status().progress >= CLOSE or not lifecycle.swapping)
    if end != "close":
        request = RecommendRequest(user=UserRef(id="user000001"), k=3)
        assert len(old.recommend(request).items) == 3
    lifecycle.leave(generation)
    until(lambda: not lifecycle.swapping)
    published = stage in ("hand_over", "lifecycle._publish") and end != "fail"
    assert lifecycle.status().state == ("ready" if published else "failed")
    assert (lifecycle._service is old) != published
    if end == "fail":
        assert lifecycle.service is old and lifecycle.in_flight == 0
    if end == "close":
        closing.join(60)
    else:
        assert engines() == before + 1 + published  # a published one, and what a rollback needs
        lifecycle.close()
    until(lambda: engines() == before)


def test_a_link_inside_the_folder_may_be_named(server, bundles):
    (bundles / "current").symlink_to("two")
    assert begin(server, "current").status_code == 202
    assert ended(server)["current"]["path"] == "two"
