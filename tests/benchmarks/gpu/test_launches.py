"""benchmarks/gpu/launches.py on a model of two layers: a recorded search is hardly a launch."""

import json

import pytest

from benchmarks.gpu import launches

pytestmark = pytest.mark.slow


def test_recorded_searches_launch_next_to_nothing(tmp_path):
    """And launched ones more the more layers there are, where there are forwards."""
    found = []
    for layers in ("2", "4"):
        path = tmp_path / f"{layers}.json"
        how = ["--layers", layers, "--width", "16", "--items", "2000", "--json", str(path)]
        assert launches.main(how) == 0
        rows = json.loads(path.read_text())
        found.append({(row["strategy"], row["recorded"]): row for row in rows})
    for shallow, deep in zip(found[0].items(), found[1].items(), strict=True):
        (strategy, replayed), row = shallow
        forwards = row["in forwards"], deep[1]["in forwards"]
        assert (0 < forwards[0] < forwards[1]) == (strategy == "beam" and not replayed)
        assert row["beside them"] == deep[1]["beside them"]
        assert (row["beside them"] < 16) == replayed
        # Two layers more in each forward pass: four products, RoPE with norms and write, attention
        # and its merge, the SiLU gate, and two residual sums with norms.
        if strategy == "beam" and not replayed:
            assert forwards[1] - forwards[0] == 2 * 10 * row["rounds"]
