"""A small day of a feed that retrains itself: what goes wrong is stopped, and nothing is lost."""

import pytest

from benchmarks.server.day import BROKEN, UNWANTED, Day, DayOptions
from recserve.cli.retrain import RETURNED, STOPPED


@pytest.mark.slow
def test_a_day_of_retrains_kills_and_faults(tmp_path):
    options = DayOptions(users=100, items=400, hours=3, every=1, epochs=3, slates=2.0)
    found = Day(options, tmp_path).run()
    outcomes = {run["fault"]: run["outcome"] for run in found["runs"]}
    assert outcomes[BROKEN] == STOPPED
    assert outcomes[UNWANTED] == RETURNED
    assert found["acknowledged"] > 200 and found["lost"] == 0
    assert len(found["quality"]) == options.hours + 1
