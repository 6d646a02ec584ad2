"""benchmarks/server/burst.py at its smallest: a queue that is too small, and a probe meanwhile."""

import json

import pytest

from benchmarks.server import burst

pytestmark = pytest.mark.slow


def test_what_does_not_fit_the_queue_is_refused_and_the_probe_is_answered(tmp_path, capsys):
    path = tmp_path / "burst.json"
    how = ["--requests", "200", "--max-queue", "4", "--items", "500"]
    assert burst.main([*how, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    statuses = found["statuses"]
    assert sum(statuses.values()) == 200 and set(statuses) == {"200", "429"}
    assert statuses["200"] >= 4
    first = found["first_429_ms"]
    assert 0 < first["since_sent"] <= first["since_start"] <= found["last_answer_ms"]
    assert found["live_quiet_ms"]["probes"] > 0
    assert "first_429_ms" in capsys.readouterr().out
