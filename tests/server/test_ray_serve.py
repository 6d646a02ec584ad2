"""Replicas on a local Ray: affinity, a killed replica, rolling update, overload."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import redis

ray = pytest.importorskip("ray", reason="NO ray on this machine: the Ray Serve tests did not run")

from recserve.config import ConfigError  # noqa: E402
from recserve.features.catalog.fleet import FleetDirectory  # noqa: E402
from recserve.features.redis_connection import connect  # noqa: E402
from recserve.server import ray_serve  # noqa: E402
from recserve.server.ray_serve import ReplicaOptions, app, deploy, running  # noqa: E402
from tests.support.redis_server import free_port  # noqa: E402
from tests.support.reference_process import ENVIRONMENT  # noqa: E402
from tests.support.tiny_bundle import NUM_USERS, tiny_bundle  # noqa: E402

USERS = [f"user{number:06d}" for number in range(NUM_USERS)]
SIGNING_KEY = {"signing_key": "a-key-of-sixteen"}


@dataclass
class Cluster:
    """A running application, and the bundles that it may serve."""

    client: httpx.Client
    bundle: Path
    other: Path

    def options(self, bundle: Path, **values) -> ReplicaOptions:
        settings = {"bundle": str(bundle), "store": f"lmdb:{bundle}.history", "device": "cpu"}
        settings |= {"slate_log": f"{bundle}.slates", **SIGNING_KEY}
        return ReplicaOptions(settings=settings, min_replicas=2, cpus=0.5, **values)

    def recommend(self, user: str, sticky: bool = True, explain: bool = False) -> httpx.Response:
        body = {"user": {"id": user}, "k": 5, "explain": explain}
        headers = {"X-Session-Id": user} if sticky else {}
        return self.client.post("/v1/recommend", json=body, headers=headers)

    def hit_share(self, sticky: bool) -> float:
        """Asks new replicas three times for each user; returns the share of cached tokens."""
        deploy(self.options(self.bundle))
        cached = total = 0
        for user in USERS * 3:
            work = self.recommend(user, sticky, explain=True).json()["explanation"]
            cached += work["root_tokens_cached"]
            total += work["root_tokens_cached"] + work["root_tokens_computed"]
        return cached / total


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    bundle = tiny_bundle(folder / "one", ranker=False)
    other = tiny_bundle(folder / "two", recommender=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Cluster(httpx.Client(), bundle, other)
        with running(made.options(bundle), port=free_port()) as address:
            made.client = httpx.Client(base_url=address, timeout=60)
            yield made


def test_unknown_options_and_wrong_order_are_refused():
    with pytest.raises(ValueError, match="min_replica\n"):
        app({"min_replica": 2})
    with pytest.raises(ValueError, match="at least min_replicas = 4, got 2"):
        app({"min_replicas": 4, "max_replicas": 2})


def test_an_open_address_needs_keys(tmp_path):
    options = ReplicaOptions(settings={"bundle": str(tmp_path)})
    with pytest.raises(ConfigError, match="no api_keys"), running(options, host="0.0.0.0"):
        pass


KEYS = {"api_keys": ["a-key-of-sixteen"]}


@pytest.mark.parametrize("door", ["scale", "serve run", "replica"])
@pytest.mark.parametrize(
    ("replicas", "settings", "opens"),
    [
        ({"min_replicas": 2}, {}, False),
        ({"min_replicas": 1, "max_replicas": 3}, {}, False),
        ({"min_replicas": 2}, SIGNING_KEY, True),
        ({"min_replicas": 1}, {}, True),
        ({"min_replicas": 2}, {"bundle": None, "llm": "folder"}, True),  # no slates, no tokens
    ],
)
def test_several_replicas_need_one_signing_key(
    tmp_path, monkeypatch, door, replicas, settings, opens
):
    options = ReplicaOptions(settings={"bundle": str(tmp_path), **settings}, **replicas)
    stop = Mock(side_effect=OSError("it goes on"))
    monkeypatch.setattr(ray_serve, "ServiceLoader", stop)
    monkeypatch.setattr(ray, "init", stop)

    def enter():
        if door == "scale":
            with running(options):
                pass
        elif door == "serve run":
            app(options.model_dump(mode="json"))
            stop()
        else:
            ray_serve.Replica.__serve_build_asgi_app__(SimpleNamespace(_options=options))

    with (
        pytest.raises(OSError, match="it goes on")
        if opens
        else pytest.raises(
            ConfigError, match=r"^signing_key: is required, because up to [23] replicas serve"
        )
    ):
        enter()


@pytest.mark.parametrize(
    ("host", "settings", "opens"),
    [
        ("0.0.0.0", {}, False),  # Ray's own default for `serve deploy`
        ("::", {"host": "127.0.0.1"}, False),
        ("10.1.2.3", {}, False),
        ("127.0.0.1", {"host": "0.0.0.0"}, False),
        ("0.0.0.0", KEYS, True),
        ("0.0.0.0", {"insecure": True}, True),
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        (None, {}, True),  # no proxy
    ],
)
def test_a_proxy_that_others_reach_needs_keys(tmp_path, monkeypatch, host, settings, opens):
    """The proxy's address stands in `http_options`, which only Ray's controller knows."""
    options = ReplicaOptions(settings={"bundle": str(tmp_path), **settings})
    client = SimpleNamespace(http_config=SimpleNamespace(host=host))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_serve, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(
        ray_serve, "ServiceLoader", Mock(side_effect=OSError("the models are loaded"))
    )
    args = options.model_dump(mode="json")
    replica = SimpleNamespace(_options=options)
    begin = ray_serve.Replica.__serve_build_asgi_app__
    if opens:
        app(args)
        with pytest.raises(OSError, match="the models are loaded"):
            begin(replica)
        return
    with pytest.raises(ConfigError, match="no api_keys"):
        app(args)
    with pytest.raises(ConfigError, match="no api_keys"):
        begin(replica)


@pytest.mark.parametrize("where", ["settings", "environment", "file"])
@pytest.mark.parametrize("given", [None, "file", "redis", "redis://other:1/0"])
@pytest.mark.parametrize(
    "store", ["redis://h:1/0", "rediss+cluster://h:1?ttl_s=5", "lmdb:/x", None]
)
def test_replicas_with_a_redis_share_one_catalogue(tmp_path, monkeypatch, where, given, store):
    settings, file = {"store": store, **SIGNING_KEY}, tmp_path / "settings.yaml"
    values = {} if given is None else {"catalog_log": given}
    file.write_text(json.dumps({"bundle": str(tmp_path), **(values if where == "file" else {})}))
    if where == "settings":
        settings |= values
    if where == "environment" and given is not None:
        monkeypatch.setenv("RECSERVE_CATALOG_LOG", given)
    options = ReplicaOptions(settings=settings, config=file, min_replicas=2)
    redis = store is not None and store.startswith("redis")
    if given == "redis" and not redis:
        with pytest.raises(ConfigError, match="catalog_log: redis is the Redis of store"):
            options.server_config()
        return
    assert options.server_config().catalog_log == (given or ("redis" if redis else "file"))
    one = options.model_copy(update={"min_replicas": 1})
    assert one.server_config().catalog_log == (given or "file")


@pytest.mark.slow
def test_replicas_that_do_not_fit_this_machine_are_refused(tmp_path):
    settings = {"bundle": str(tmp_path), **SIGNING_KEY}
    options = ReplicaOptions(settings=settings, min_replicas=3, cpus=1000)
    message = "cpus: 3 replicas of 1000 need 3000, this machine has "
    with pytest.raises(ValueError, match=message), running(options, port=free_port()):
        pass


@pytest.mark.slow
def test_a_user_stays_with_one_replica(cluster):
    """The first of three requests computes the prefix; no replica computes it again."""
    assert cluster.hit_share(sticky=True) == pytest.approx(2 / 3)
    assert cluster.hit_share(sticky=False) < 0.6


@pytest.mark.slow
def test_every_replica_verifies_the_tokens_of_the_others(cluster):
    slate = cluster.recommend(USERS[0]).json()
    token = {
        "item_id": slate["items"][0]["item_id"],
        "attribution_token": slate["attribution_token"],
    }
    for user in USERS[:12]:  # as session, it reaches one of the replicas
        event = {"user_id": USERS[0], "event_id": f"of {user}", **token}
        answer = cluster.client.post(
            "/v1/events", json={"events": [event]}, headers={"X-Session-Id": user}
        ).json()
        assert answer["accepted"] == 1 and not answer.get("unattributed")


@pytest.mark.slow
def test_changes_of_one_process_are_refused(cluster):
    answer = cluster.client.put("/v1/items", json={"items": [{"item_id": "x"}]})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "items_read_only"
    assert cluster.client.get("/v1/items/item000001").status_code == 200


@pytest.mark.slow
def test_replicas_with_one_log_take_changes(cluster, redis_url):
    """Whichever replica takes one, the others have it when they are asked for its version."""
    redis.Redis.from_url(redis_url).flushall()
    options = cluster.options(cluster.bundle)
    deploy(options.model_copy(update={"settings": {**options.settings, "store": redis_url}}))
    for number, user in enumerate(USERS[:8]):  # as session, it reaches one of the replicas
        change = {"items": [{"item_id": f"new-{number}", "title": "a kettle"}]}
        taken = cluster.client.put("/v1/items", json=change, headers={"X-Session-Id": user})
        assert taken.status_code == 200, taken.text
        version = {"X-Recserve-Min-Catalog-Version": taken.json()["catalog_version"]}
        for other in USERS[:8]:
            headers = {"X-Session-Id": other, **version}
            assert cluster.client.get(f"/v1/items/new-{number}", headers=headers).is_success
    states = FleetDirectory(connect(redis_url), "items").read()
    assert len(states.replicas) >= 2 and states.malformed == ()


@pytest.mark.slow
def test_a_dead_replica_loses_no_later_request(cluster):
    names = [
        one["name"]
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["name"].startswith("SERVE_REPLICA::recserve")
    ]
    assert len(names) == 2
    ray.kill(ray.get_actor(names[0], namespace="serve"))
    for user in USERS * 2:
        assert cluster.recommend(user).status_code == 200


@pytest.mark.slow
def test_a_rolling_update_answers_every_request(cluster):
    before = cluster.recommend(USERS[0]).json()["model_version"]
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(deploy, cluster.options(cluster.other))
        answers = []
        while not update.done():
            answers.append(cluster.recommend(USERS[len(answers) % NUM_USERS]))
        update.result()
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json()["model_version"] == before
    assert cluster.recommend(USERS[0]).json()["model_version"] != before


@pytest.mark.slow
def test_an_overloaded_application_answers_429(cluster):
    deploy(cluster.options(cluster.other, max_requests=1, max_waiting=1))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(cluster.recommend, USERS * 4))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused and len(refused) < len(answers)
    assert {answer.status_code for answer in refused} == {429}
    assert {answer.headers["Retry-After"] for answer in refused} == {"1"}
