"""The comparison of the simulated replica with a real server, at its smallest."""

import json

import pytest

from benchmarks.scale import small_case
from tests.support.redis_server import free_port

pytestmark = pytest.mark.slow


def test_server_and_simulation_agree_on_the_cached_share(tmp_path):
    path = tmp_path / "small.json"
    how = ["--loads", "0.1", "--seconds", "4", "--requests", "60", "--cached-users", "400"]
    assert small_case.main([*how, "--port", str(free_port()), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    (row,) = found["loads"]
    assert found["costs"]["cold_ms"] > 0
    assert row["real"]["rate"] == pytest.approx(row["simulated"]["rate"], rel=0.3)
    # A few dozen requests: the standard deviation of a share is below 0.1.
    assert abs(row["real"]["hit_share"] - row["simulated"]["hit_share"]) < 0.35
