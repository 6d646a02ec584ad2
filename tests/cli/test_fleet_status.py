"""`recserve fleet status`: what servers say of themselves, and what others may write there."""

import json
import random

import msgspec
import pytest
from typer.testing import CliRunner

from recserve.cli import app
from recserve.features.catalog import fleet
from recserve.features.catalog.fleet import FleetDirectory, Replica
from recserve.features.redis_connection import connect

NAME = "shop.items"
KEY = f"recserve:items:{{{NAME}}}:replicas"


def status(*words, **environment):
    return CliRunner().invoke(
        app, ["fleet", "status", *words], env={"COLUMNS": "200", **environment}
    )


@pytest.fixture
def directory(empty_redis, redis_url):
    directory = FleetDirectory(connect(redis_url), NAME)
    yield directory
    directory.close()


def draw(rng, number):
    return Replica(
        id=f"host-{number}-{rng.randrange(10**6)}",
        address=f"host-{number}:8080",
        state=rng.choice(["loading", "ready", "swapping", "draining"]),
        bundle=rng.choice(["v7", "v8 [bold]"]),
        model_version="m",
        catalog_version=rng.choice(["c.1.5", "c.1.6"]),
        lag_s=rng.random(),
        lag_positions=rng.randrange(9),
        queue_depth=rng.randrange(9),
        started_at=1.7e9 + rng.random(),
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_exit_status_says_whether_servers_agree(directory, redis_url, seed):
    """Servers that load or end do not count; the table and JSON have all of them."""
    rng = random.Random(seed)
    replicas = [draw(rng, number) for number in range(rng.randrange(1, 5))]
    if seed % 2:  # they agree
        replicas = [
            msgspec.structs.replace(one, bundle="v7", catalog_version="c.1.5") for one in replicas
        ]
    for one in replicas:
        directory.report(one)
        directory.report(one)  # later reports replace the first
    serving = [one for one in replicas if one.state in ("ready", "swapping")]
    agrees = len({(one.bundle, one.catalog_version) for one in serving}) == 1
    words = (redis_url, "--catalog-name", NAME)
    done, table = status(*words, "--json"), status(*words)
    found = json.loads(done.stdout)
    assert found["agrees"] is agrees and found["malformed"] == []
    ages = [one.pop("age_s") for one in found["replicas"]]
    assert found["replicas"] == sorted(map(msgspec.to_builtins, replicas), key=lambda r: r["id"])
    assert all(0 <= age < fleet.TTL_S for age in ages)
    assert done.exit_code == table.exit_code == (0 if agrees else 1)
    for one in replicas:
        assert one.address in table.stdout and one.bundle in table.stdout


def test_a_server_that_ends_or_is_silent_is_no_longer_listed(directory, empty_redis, monkeypatch):
    rng = random.Random(3)
    first, second, third = (draw(rng, number) for number in range(3))
    for one in (first, second, third):
        directory.report(one)
    directory.leave(first.id)
    report = empty_redis.hget(KEY, second.id)
    empty_redis.hset(KEY, second.id, b"1" + report[report.index(b" ") :])
    assert [one.id for one in directory.read().replicas] == [third.id]
    directory.report(third)
    assert empty_redis.hkeys(KEY) == [third.id.encode()]
    monkeypatch.setattr(fleet, "TTL_S", 0.05)
    directory.report(third)
    assert 0 < empty_redis.pttl(KEY) <= 50


GOOD = msgspec.json.encode(Replica(id="x", state="ready"))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"no time",
        b"%d ",
        b"%d {",
        b"%d []",
        b"%d {}",
        b"%d null",
        b'%d {"id": "y"}',
        b"%d " + GOOD.replace(b"ready", b"\\u001b[31mred"),
        b"%d " + GOOD.replace(b'"bundle":""', b'"bundle":"\\u001b]0;title\\u0007"'),
        b"%d " + GOOD.replace(b'"queue_depth":0', b'"queue_depth":-1'),
        b"%d " + GOOD.replace(b'"lag_s":0.0', b'"lag_s":NaN'),
        b"%d " + GOOD.replace(b'"lag_s":0.0', b'"lag_s":1e999'),
        b"%d " + GOOD.replace(b'"address":""', b'"address":"' + b"x" * 300 + b'"'),
        b"%d " + b"x" * 100_000,
        b"%d \xff\xfe",
    ],
)
def test_what_others_write_is_checked(directory, empty_redis, redis_url, value):
    """A report that cannot be read is named, and is no agreement; other reports are shown."""
    now = empty_redis.time()[0] * 1000
    directory.report(Replica(id="good", address="good:1", state="ready"))
    empty_redis.hset(KEY, "x", value.replace(b"%d", b"%d" % now))
    done = status(redis_url, "--catalog-name", NAME)
    assert done.exit_code == 1 and "good:1" in done.stdout
    assert "error: report of x: " in done.output and "\x1b" not in done.output
    assert len(json.loads(status(redis_url, "--catalog-name", NAME, "--json").stdout)["malformed"])


def test_too_many_or_something_else_is_one_line(directory, empty_redis, redis_url):
    def refused(message):
        done = status(redis_url, "--catalog-name", NAME)
        assert done.exit_code == 1 and isinstance(done.exception, OSError)
        assert message in str(done.exception)

    empty_redis.hset(KEY, mapping={str(number): "x" for number in range(fleet.MAX_REPLICAS + 1)})
    refused("1001 servers; expected at most 1000")
    directory.report(Replica(id="good", state="ready"))
    assert [one.id for one in directory.read().replicas] == ["good"]
    empty_redis.delete(KEY)
    empty_redis.hset(KEY, "y" * 10_000, "x")
    assert len(directory.read().malformed[0]) < 300
    empty_redis.delete(KEY)
    empty_redis.set(KEY, "x")
    refused("WRONGTYPE")


def test_wrong_calls_are_one_line(redis_url, empty_redis, tmp_path):
    for words, message in (
        ((redis_url,), "no server has reported to the catalogue items"),
        ((redis_url, "--catalog-name", "a{b}"), "catalog_name is 'a{b}'"),
        (("http://127.0.0.1:8080",), "Redis URL: scheme is http"),
        (("redis://127.0.0.1:1/0",), "redis recserve:items:{items}:replicas: ConnectionError"),
        (("redis+cluster://127.0.0.1:1",), "redis: "),
    ):
        done = status(*words)
        assert done.exit_code == 1 and message in str(done.exception), words
    assert status(RECSERVE_STORE="").exit_code == 2


def test_a_settings_file_names_the_redis_and_the_catalogue(directory, redis_url, tmp_path):
    directory.report(Replica(id="a", address="a:1", state="ready"))
    file = tmp_path / "server.yaml"
    settings = {"bundle": str(tmp_path), "store": f"{redis_url}?ttl_s=60", "catalog_name": NAME}
    for log, found in (("redis", True), (redis_url, True), ("file", False)):
        file.write_text(json.dumps({**settings, "catalog_log": log}))
        done = status("--config", str(file), RECSERVE_SIGNING_KEY="a-key-of-sixteen")
        assert ("a:1" in done.stdout) is found and done.exit_code == (0 if found else 1)
    assert "shares no catalogue" in str(done.exception)
