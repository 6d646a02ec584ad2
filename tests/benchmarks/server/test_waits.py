"""benchmarks/server/waits.py at its smallest: one kind of large request."""

import json

import pytest

from benchmarks.server import waits

pytestmark = pytest.mark.slow


def test_a_row_says_how_long_both_small_requests_wait(tmp_path, capsys):
    path = tmp_path / "waits.json"
    how = ["--size", "64", "--threads", "1", "--kinds", "rank, likelihood"]
    assert waits.main([*how, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["kind"] == "rank, likelihood"
    assert row["ms"] > 0 and row["slate waits, ms"] > 0 and row["text waits, ms"] > 0
    assert "waits" in capsys.readouterr().out
