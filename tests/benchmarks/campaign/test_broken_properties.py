"""Checks of the campaign pass on a sound program, and fail on one with a single broken property."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.campaign.batch_writer import BatchWriter, count_lost, wait_for_batches
from benchmarks.campaign.check import Budget
from benchmarks.campaign.checks.engine_faults import engine_death
from benchmarks.campaign.checks.sampling_law import ALPHA, LEAST_TABLES, count_missed, measure
from benchmarks.campaign.checks.security import try_wrong_keys
from benchmarks.campaign.site import ADMIN_KEY, KEY, SERVE, Site
from recserve.service import Service
from tests.support.broken_properties import MODULE, broken
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


class BrokenSite(Site):
    """A site whose servers have a broken property; None breaks nothing."""

    def __init__(self, folder, name):
        super().__init__(folder)
        self.name = name

    def start(self, program=SERVE, **settings):
        if self.name is not None:
            program = ("-m", MODULE, self.name, *program[1:])
        return super().start(program, **settings)


def failing(finding):
    """The figures of a finding that miss their bounds."""
    return {figure.name for figure in finding.figures if figure.misses}


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


@pytest.mark.parametrize("name", [None, "lossy_store", "short_batches"])
def test_r8_counts_lost_events(name, tmp_path):
    with broken(name), items_server(tmp_path) as client:
        writers = [BatchWriter(f"writer{n}", str(client.base_url)) for n in range(2)]
        for writer in writers:
            writer.start()
        wait_for_batches(writers, 100)
        for writer in writers:
            writer.stop()
        for writer in writers:
            writer.join()
        events = list(itertools.chain.from_iterable(b for one in writers for b in one.take()))
        assert len(set(events)) == len(events) > 1000
        assert (count_lost(client, events) > 0) == (name is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "lossy_store", "short_batches"])
def test_r8(name, tmp_path):
    """At least 800 batches: a store that drops 2 % of them passes with a probability of 1e-7."""
    found = failing(engine_death(BrokenSite(tmp_path, name), Budget(0.0)))
    assert found - {"slowest restart beyond the first start, in s"} == (
        {"acknowledged events that are not stored once"} if name else set()
    )
