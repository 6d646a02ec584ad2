"""What is reported of rejected rows, for any number of reasons."""

import numpy as np
import pytest

from recserve.features.tables.parquet import MAX_EXAMPLES, RowCheck


@pytest.mark.parametrize("seed", range(12))
def test_examples_are_few_and_every_reason_has_one(tmp_path, seed):
    """The first rows of each reason, ten in all; after these, one row of each new reason."""
    drawn = np.random.default_rng(seed)
    check = RowCheck(tmp_path / "t.parquet", 200, "skip")
    wanted, left, counts = [], np.ones(200, dtype=bool), {}
    for number in range(int(drawn.integers(1, 9))):
        bad = drawn.random(200) < drawn.choice([0.0, 0.01, 0.2])
        rows = np.flatnonzero(bad & left)
        check.refuse(bad, f"reason {number}", "x", lambda row, n=number: f"{n}")
        left &= ~bad
        if rows.size:
            counts[f"reason {number}"] = rows.size
        room = max(1, MAX_EXAMPLES - len(wanted))
        wanted += [f"column x, row {row}: {number}" for row in rows[:room]]
    report = check.report()
    assert list(report.examples) == wanted and report.dropped == counts
    assert report.kept_rows.tolist() == np.flatnonzero(left).tolist()
