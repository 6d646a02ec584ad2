"""Checks of the campaign pass on a sound program, and fail on one with a single broken property."""

from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.campaign.checks.sampling_law import ALPHA, LEAST_TABLES, count_missed, measure
from benchmarks.campaign.checks.security import try_wrong_keys
from benchmarks.campaign.site import ADMIN_KEY, KEY
from recserve.service import Service
from tests.support.broken_properties import broken
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


@contextmanager
def items_server(tmp_path, **settings):
    with live(Service.open(shared_bundle(), f"lmdb:{tmp_path / 'store'}", "cpu"), **settings) as it:
        yield it


@pytest.mark.parametrize(
    "name, tables",
    [(None, 12), ("forgotten_product", 12), ("accepted_tails", 12)]
    + [pytest.param("biased_rejection", LEAST_TABLES, marks=pytest.mark.slow)],
)
def test_r14(name, tables):
    """20,000 steps for each table. A sound rule would fail here with about one seed in 1000."""
    with broken(name):
        found = measure(range(tables), np.random.default_rng(0))
    assert (found.smallest < ALPHA) == (name is not None)
    assert not found.impossible or name is not None


def test_r14_finds_rules_that_are_told_another_draft():
    assert count_missed() == 0


@pytest.mark.parametrize(
    "name, path", [(None, ""), ("open_events", "/v1/events")] + [("open_items", "/v1/items")]
)
def test_r21(name, path, tmp_path):
    with broken(name), items_server(tmp_path, api_keys=(KEY,), admin_keys=(ADMIN_KEY,)) as client:
        found = try_wrong_keys(client, client.app.routes)
    assert found.tried > 250
    assert bool(found.passed) == (name is not None)
    assert {one.split()[1] for one in found.passed} <= {path}
