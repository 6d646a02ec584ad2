"""benchmarks/server/shared_cores.py at its smallest: one setting, alone and beside a process."""

import json

import pytest

from benchmarks.server import shared_cores

pytestmark = pytest.mark.slow


def test_a_row_alone_and_a_row_beside_a_neighbour(tmp_path, capsys):
    path = tmp_path / "spins.json"
    how = ["--spins", "1000", "--threads", "1", "--seconds", "0", "--turns", "1"]
    assert shared_cores.main([*how, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["setting"] for row in rows] == ["1000 alone", "1000 busy"]
    assert all(0 < row["median_ms"] <= row["p99_ms"] for row in rows)
    assert capsys.readouterr().out.count("p99") == 2
