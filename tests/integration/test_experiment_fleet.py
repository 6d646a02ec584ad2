"""Three replicas with one experiment in Redis, under faults: a checker judges the counts.

A short version of check R26 of the campaign.
"""

import pytest

from benchmarks.campaign.experiment_fleet import on_one_redis
from benchmarks.campaign.fleet_faults import Plan
from benchmarks.campaign.site import Site

pytestmark = pytest.mark.slow


def test_counts_are_explained(tmp_path):
    """Each acknowledged click counts once, no answer twice, and a stop holds on all replicas."""
    site = Site(tmp_path, seed=4)
    site.begin("experiment")
    seen = on_one_redis(site, Plan(1200, 5, 120, seed=4))
    assert not seen.clicks and not seen.answers, (seen.clicks, seen.answers)
    assert not seen.stops and not seen.verdicts, (seen.stops, seen.verdicts)
    assert not seen.record.wrong
    assert len(seen.faults) >= 4 and seen.requests > 100 and sum(seen.record.clicks.values()) > 50
    assert seen.lacking < 0.2 * seen.requests
