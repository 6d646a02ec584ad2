"""Three replicas with one catalogue in Redis, under faults: a checker judges what clients saw.

A short version of check R25 of the campaign.
"""

import pytest

from benchmarks.campaign.catalog_fleet import on_one_redis, with_failovers
from benchmarks.campaign.fleet_faults import Plan
from benchmarks.campaign.site import Site

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("run, faults", [(on_one_redis, 6), (with_failovers, 2)])
def test_histories_are_explained(run, faults, tmp_path):
    """Nothing that was acknowledged is lost on one Redis; what a failover loses is counted.

    On one Redis, bundles with other catalogues are rolled out, and replicas of two serve meanwhile.
    """
    site = Site(tmp_path, seed=3)
    site.begin("fleet")
    seen = run(site, Plan(300, faults, 90, seed=4))
    assert not seen.report.count(), seen.report.violations
    assert seen.report.unasked == 0 and not seen.record.wrong
    assert seen.num_operations > 100 and seen.faults
    assert seen.lost_events == 0
    if run is on_one_redis:
        assert not seen.report.lost
        assert seen.assigned
    else:
        assert bool(seen.report.lost) <= bool(seen.losses)
