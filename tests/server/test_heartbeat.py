"""Servers of one catalogue say what they serve, while they serve, and `fleet status` shows it."""

import json

import pytest
import redis
from typer.testing import CliRunner

from recserve.cli import app
from recserve.config import ServerConfig
from recserve.server import heartbeat
from tests.support.live_server import run_server
from tests.support.redis_server import start_redis, wait_for
from tests.support.tiny_bundle import shared_bundle


def fleet(url):
    done = CliRunner().invoke(app, ["fleet", "status", url, "--json"])
    assert done.stdout, done.exception
    return json.loads(done.stdout), done.exit_code


@pytest.fixture
def config(tmp_path, redis_url, monkeypatch):
    redis.Redis.from_url(redis_url).flushall()
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.05)

    def config(port, url=redis_url):
        return ServerConfig(
            bundle=shared_bundle(),
            store=url,
            catalog_log="redis",
            port=port,
            signing_key="a-key-of-sixteen",
            experiments_dir=tmp_path / str(port),
            journal=tmp_path / f"items{port}",
        )

    return config


def test_servers_are_listed_while_they_serve_and_agree_after_a_change(config, redis_url):
    with run_server(config(1)) as one:
        with run_server(config(2)) as two:
            wait_for(lambda: len(fleet(redis_url)[0]["replicas"]) == 2, "two are not listed")
            change = {"items": [{"item_id": "new", "title": "a kettle"}]}
            version = one.put("/v1/items", json=change).json()["catalog_version"]
            expected = {version}

            def versions():
                return {each["catalog_version"] for each in fleet(redis_url)[0]["replicas"]}

            wait_for(lambda: versions() == expected, "the change is not reported")
            found, status = fleet(redis_url)
            assert status == 0 and {each["state"] for each in found["replicas"]} == {"ready"}
            assert {each["bundle"] for each in found["replicas"]} == {shared_bundle().name}
            two.app.state.lifecycle.draining = True
            wait_for(
                lambda: (
                    {each["state"] for each in fleet(redis_url)[0]["replicas"]}
                    == {"ready", "draining"}
                ),
                "it does not drain",
            )
            assert fleet(redis_url)[1] == 0
        assert len(fleet(redis_url)[0]["replicas"]) == 1


def test_a_server_without_redis_goes_on_and_is_listed_again(config, tmp_path):
    process, port = start_redis(tmp_path)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with run_server(config(1, url)) as client:
            wait_for(lambda: fleet(url)[1] == 0, "it is not listed")
            process.kill()
            process.wait()
            assert client.get("/health/ready").status_code == 200
            process, _ = start_redis(tmp_path, port)
            wait_for(lambda: len(fleet(url)[0]["replicas"]) == 1, "it is not listed again")
    finally:
        process.kill()
        process.wait()


def test_a_server_with_a_file_has_no_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "Heartbeat", None)
    with run_server(ServerConfig(bundle=shared_bundle(), store=f"lmdb:{tmp_path}/h")) as client:
        assert client.get("/health/ready").status_code == 200
