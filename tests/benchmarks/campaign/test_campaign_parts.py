"""What the campaign does to servers: proxy faults, drawn requests, damage, statistics."""

import random
import shutil
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from benchmarks.campaign.checks.bundles import DAMAGES
from benchmarks.campaign.checks.fuzzing import mutated
from benchmarks.campaign.checks.offline import POWER_PAIRS
from benchmarks.campaign.checks.security import auc
from benchmarks.campaign.checks.soak import growth
from benchmarks.campaign.fault_proxy import FaultProxy
from benchmarks.campaign.openapi_bodies import RequestSource
from benchmarks.campaign.traffic import apart
from benchmarks.experiments.ab_power import ALPHA, EFFECT, drawn_trace, paired_p, replay
from recserve.config import ServerConfig
from recserve.server.app import create_app
from recserve.service import Service
from tests.support.tiny_bundle import shared_bundle


@contextmanager
def echo():
    """A server that sends back what it receives, in upper case."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    wire, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(wire,), daemon=True).start()

        def answer(wire):
            with wire:
                try:
                    while data := wire.recv(100):
                        wire.sendall(data.upper())
                except OSError:
                    pass

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def asked(port, timeout):
    """What comes back for `hello`; the error's name if there is one."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as wire:
            wire.settimeout(timeout)
            wire.sendall(b"hello")
            return wire.recv(100)
    except OSError as error:
        return type(error).__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, expected",
    [
        ("down", {"ConnectionRefusedError"}),
        ("refuse", {"ConnectionResetError", "BrokenPipeError", b""}),
        ("hang", {"TimeoutError"}),
        ("latency", {"TimeoutError"}),
        ("half", {b"HE"}),
        ("reset", {b"HE", "ConnectionResetError", b""}),
    ],
)
def test_faults_come_and_go(fault, expected):
    with echo() as port, FaultProxy(port) as proxy:
        assert asked(proxy.port, 30) == b"HELLO"
        with proxy.fault(fault):
            assert asked(proxy.port, 0.3 if "TimeoutError" in expected else 30) in expected
        assert asked(proxy.port, 30) == b"HELLO"


def test_a_garbled_reply_has_the_length_of_the_true_one():
    with echo() as port, FaultProxy(port) as proxy, proxy.fault("garbage"):
        said = asked(proxy.port, 30)
        assert len(said) == 5 and said != b"HELLO"


@pytest.fixture(scope="module")
def document():
    return create_app(ServerConfig(bundle=shared_bundle())).openapi()


def test_drawn_bodies_follow_their_schemas(document):
    source = RequestSource(document, ("item000001",), 0)
    with_body = [one for one in source.operations if one.body is not None]
    assert len(with_body) > 10
    for operation in with_body:
        schema = {**operation.body, "components": document["components"]}
        check = jsonschema.Draft202012Validator(schema)
        for _ in range(20):
            check.validate(source.value(operation.body))


@pytest.mark.slow
def test_drawn_requests_are_of_every_kind(document):
    source = RequestSource(document, ("item000001",), 0)
    drawn = [source.request(one) for _ in range(40) for one in source.operations]
    assert {one.valid for one in drawn} == {True, False}
    assert all("{" not in one.path for one in drawn)
    again = RequestSource(document, ("item000001",), 0)
    assert drawn == [again.request(one) for _ in range(40) for one in again.operations]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_each_damage_is_found(damage, tmp_path):
    folder = Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))
    damage(folder, np.random.default_rng(3))
    with pytest.raises((ValueError, OSError)):
        Service.open(folder, f"lmdb:{tmp_path / 'store'}", "cpu")


def test_small_statistics():
    assert apart([1.0, 1.0], [3.0, 3.0]) == apart([3.0, 3.0], [1.0, 1.0]) == 3.0
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0 and auc([3.0, 1.0], [2.0, 2.0]) == 0.5
    draw = random.Random(0)
    assert len({mutated(b"abcdefgh", draw) for _ in range(50)}) > 40


def test_growth_ignores_a_spike_and_says_how_sure_it_is():
    million = [n * 10**6 for n in range(20)]
    steady = growth(million, [n * 2**20 + (n == 7) * 2**30 for n in range(20)])
    assert steady.low <= steady.estimate == 1.0 <= steady.high
    random = np.random.default_rng(0)
    flat = growth(million, random.integers(0, 2**20, 20).tolist())
    assert flat.low < 0 < flat.high < 1
    assert np.isnan(growth([5, 5], [1, 2]).estimate)


def test_the_power_of_the_latency_tool_needs_its_pairs():
    trace = drawn_trace(20_000, 0)
    found = [paired_p(trace, POWER_PAIRS, EFFECT, seed, "p99") < ALPHA for seed in range(12)]
    few = [paired_p(trace, 1000, EFFECT, seed, "p99") < ALPHA for seed in range(12)]
    assert sum(found) >= 9 > 4 >= sum(few)
    assert paired_p(trace, 2000, 0.0, 1, "p99") == replay(trace, "paired", 2000, 0.0, 1)["p"]["p99"]
