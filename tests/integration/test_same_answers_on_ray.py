"""Replicas and batch actors on Ray give the slates of one process, byte for byte."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

pytest.importorskip("ray", reason="NO ray on this machine: the Ray tests did not run")

from recserve.features.synthetic import SyntheticOptions, write_synthetic  # noqa: E402
from recserve.schemas.items import RankRequest  # noqa: E402
from recserve.server.ray_serve import ReplicaOptions, running  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402
from tests.support.redis_server import free_port  # noqa: E402
from tests.support.reference_process import ENVIRONMENT, process_answers  # noqa: E402
from tests.support.request_set import (  # noqa: E402
    REQUESTS,
    STRATEGIES,
    read_slates,
    same_part,
    user_row,
    without_volatile,
    write_user_rows,
)
from tests.support.tiny_bundle import NUM_ITEMS, NUM_USERS, built, with_models  # noqa: E402

pytestmark = pytest.mark.slow
PROBE = {"user": {"id": "user000030"}, "k": 5, "strategy": "beam", "explain": True}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("same")
    files = write_synthetic(folder / "data", SyntheticOptions(NUM_ITEMS, NUM_USERS, 12, seed=3))
    built(files, folder / "bundle")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield with_models(folder / "bundle", every_strategy=True)


@pytest.fixture(scope="module")
def expected(bundle):
    """The answers of one process, by name of the request."""
    answers = process_answers(bundle, f"lmdb:{bundle}.one", list(REQUESTS.values()))
    strategies = {json.loads(answer)["strategy"] for answer in answers}
    assert strategies >= {*STRATEGIES, "ranker", "likelihood", "popular"}
    return dict(zip(REQUESTS, answers, strict=True))


def two_sessions(client):
    """Returns two session ids whose requests reach different replicas.

    The second replica has not yet computed the prefix of the user that the first one knows.
    """
    computed = []
    for number in range(32):
        session = f"session-{number}"
        answer = client.post("/v1/recommend", json=PROBE, headers={"X-Session-Id": session})
        if not answer.json()["explanation"]["root_tokens_cached"]:
            computed.append(session)
        if len(computed) == 2:
            return computed
    raise AssertionError("32 session ids reach one replica")


def test_each_of_two_replicas_gives_the_answers_of_one_process(bundle, expected):
    settings = {"bundle": str(bundle), "store": f"lmdb:{bundle}.replicas", "device": "cpu"}
    settings |= {"signing_key": "a-key-of-sixteen"}
    options = ReplicaOptions(settings=settings, min_replicas=2, cpus=0.5)
    with (
        running(options, port=free_port()) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        for session in two_sessions(client):
            client.headers["X-Session-Id"] = session
            for name, request in REQUESTS.items():
                route = "/v1/rank" if isinstance(request, RankRequest) else "/v1/recommend"
                answer = client.post(route, content=msgspec.json.encode(request))
                assert answer.status_code == 200, (name, answer.text)
                assert without_volatile(answer.json()) == expected[name], (session, name)


def test_a_batch_actor_writes_the_slates_of_one_process(bundle, expected, tmp_path: Path):
    """All rows are one part: each part begins with an empty prefix cache, one process does not."""
    rows = {name: row for name, one in REQUESTS.items() if (row := user_row(one)) is not None}
    assert set(STRATEGIES) <= set(rows)
    write_user_rows(tmp_path / "users.parquet", list(rows.values()))
    command = [sys.executable, "-m", "recserve", "batch", "--engine", "ray"]
    command += ["--input", tmp_path / "users.parquet", "--output", tmp_path / "slates"]
    command += ["--bundle", bundle, "--store", f"lmdb:{bundle}.batch", "--device", "cpu"]
    command += ["-k", "10", "--in-flight", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    slates = read_slates(tmp_path / "slates")
    for name, slate in zip(rows, slates, strict=True):
        given, wanted = same_part(slate, json.loads(expected[name]))
        assert given == wanted, name
