"""The profile of the goal shape, tiny and on a CPU: every question has its rows."""

import pytest

from benchmarks.gpu.profile import profile_rows
from benchmarks.support.timing import Deadline


@pytest.mark.slow
def test_every_question_is_answered():
    rows = list(profile_rows("cpu", True, Deadline()))
    assert all(row.get("ok", True) for row in rows), rows
    by_name = {row["profile"]: row for row in reversed(rows)}
    for name in ("a warm search, replayed", "a prefill"):
        assert by_name[name]["wall_ms"] > 0 and by_name[name]["launches"] > 10
        kernels = [row for row in rows if row["profile"] == name and "kernel" in row]
        assert len(kernels) > 5 and kernels[0]["us"] >= kernels[-1]["us"] >= 0
        assert sum(row["us"] for row in kernels) <= by_name[name]["busy_ms"] * 1e3 * 1.001
    append = by_name["append one event to 8, launched"]
    assert 0 < append["host_ms"] <= append["wall_ms"]
    assert sum(name.startswith("product ") for name in by_name) == 8
    many = by_name["3 requests at once, beam 10"]
    assert many["replayed"] > 0 and many["warm_ms"] > 0
    assert list(profile_rows("cpu", True, Deadline(-1.0))) == []
