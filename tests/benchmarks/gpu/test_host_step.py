"""gpu/host_step.py: every row is of steps that were replayed, and the texts of each end."""

import json

import pytest

from benchmarks.gpu import host_step

pytestmark = pytest.mark.slow


def test_every_row_is_of_replayed_steps(tmp_path, capsys):
    path = tmp_path / "host.json"
    assert host_step.main(["--smoke", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    rows = content["rows"]
    steps = [row for row in rows if not row["host"].startswith("search")]
    assert len(steps) == 24 and len(rows) == 32 and content["goal_us"] == 50
    assert all(row["host_us"] > 0 for row in rows)
    assert all(row["replayed"] > 30 for row in steps)
    assert all(row["replayed"] == 20 for row in rows if row not in steps)
    assert len(capsys.readouterr().out.splitlines()) == 32
