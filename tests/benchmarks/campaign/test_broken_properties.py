"""Checks of the campaign pass on a sound program, and fail on one with a single broken property."""

import numpy as np
import pytest

from benchmarks.campaign.checks.sampling_law import ALPHA, LEAST_TABLES, count_missed, measure
from tests.support.broken_properties import broken


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
