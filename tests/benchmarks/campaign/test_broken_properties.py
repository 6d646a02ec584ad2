"""Checks of the campaign pass on a sound program, and fail on one with a single broken property."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from benchmarks.campaign.batch_writer import BatchWriter, count_lost, wait_for_batches
from benchmarks.campaign.check import Budget
from benchmarks.campaign.checks.engine_faults import engine_death, poison
from benchmarks.campaign.checks.exactness import DRAFTERS, Losses, asker, lossless
from benchmarks.campaign.checks.fuzzing import api
from benchmarks.campaign.checks.sampling_law import ALPHA, LEAST_TABLES, count_missed, measure
from benchmarks.campaign.checks.security import try_wrong_keys
from benchmarks.campaign.filter_oracle import draw_filter, fits, read_items
from benchmarks.campaign.site import ADMIN_KEY, KEY, LLM_NAME, SERVE, Site
from recserve.bundle.bundle import Bundle
from recserve.engine.engine_config import EngineConfig
from recserve.features.catalog.filters import ItemFilters
from recserve.models.packing import pack_weights
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.broken_properties import MODULE, broken
from tests.support.grids import chosen
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle
from tests.support.tiny_llm import tiny_llm


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, tables",
    [
        (None, 12),
        ("forgotten_product", 12),
        pytest.param("accepted_tails", 12, marks=pytest.mark.slow),
        pytest.param("biased_rejection", LEAST_TABLES, marks=pytest.mark.slow),
    ],
)
def test_r14(name, tables):
    """20,000 steps for each table. A sound rule would fail here with about one seed in 1000."""
    with broken(name):
        found = measure(range(tables), np.random.default_rng(0))
    assert (found.smallest < ALPHA) == (name is not None)
    assert not found.impossible or name is not None


def test_r14_finds_rules_that_are_told_another_draft():
    assert count_missed() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, path",
    [
        (None, ""),
        ("open_events", "/v1/events"),
        pytest.param("open_items", "/v1/items", marks=pytest.mark.slow),
    ],
)
def test_r21(name, path, tmp_path):
    with broken(name), items_server(tmp_path, api_keys=(KEY,), admin_keys=(ADMIN_KEY,)) as client:
        found = try_wrong_keys(client, client.app.routes)
    assert found.tried > 250
    assert bool(found.passed) == (name is not None)
    assert {one.split()[1] for one in found.passed} <= {path}


R8_FIGURES = {
    None: set(),
    "lossy_store": {"acknowledged events that are not stored once"},
    "short_batches": {"acknowledged events that are not stored once"},
    "shrunken_batches": {"batches of events that a ready server refuses"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen({str(n): n for n in R8_FIGURES}, "None", "lossy_store"))
def test_r8_counts_lost_events_and_refused_batches(name, tmp_path):
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
        assert len(set(events)) == len(events) > 400
        assert (count_lost(client, events) > 0) == (name in ("lossy_store", "short_batches"))
        refused = [writer.refused for writer in writers]
        assert all(refused) if name == "shrunken_batches" else not any(refused)


@pytest.mark.slow
def test_r8(tmp_path):
    """At least 800 batches: a store that drops 2 % of them passes with a probability of 1e-7."""
    found = failing(engine_death(BrokenSite(tmp_path, "lossy_store"), Budget(0.0)))
    assert found - {"slowest restart beyond the first start, in s"} == R8_FIGURES["lossy_store"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "leaking_filters"])
def test_r13_compares_slates_and_filters(name, tmp_path):
    items, random, found = read_items(shared_bundle()), np.random.default_rng(0), Losses()
    with (
        broken(name),
        items_server(tmp_path) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        for number in range(10):
            found.compare_slates(asker(client, pool), items, random, number)
    assert found.slates == 10 and found.items > 100
    assert not (found.slates_differ or found.illegal or found.short)
    assert (found.misfits > 0) == (name is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, rule",
    [
        (None, None),
        ("accepted_tails", "rejection"),
        pytest.param("forgotten_product", "block", marks=pytest.mark.slow),
    ],
)
def test_r13_compares_texts_of_each_rule(name, rule, tmp_path):
    settings = TextSettings(tiny_llm(tmp_path / LLM_NAME), drafters=DRAFTERS)
    text = load_text(settings, torch.device("cpu"))
    pack_weights(text.network)
    service = Service.of_text(text, EngineConfig(invariant=True))
    random, found = np.random.default_rng(0), Losses()
    with broken(name), live(service) as client, ThreadPoolExecutor(8) as pool:
        for number in range(4 * len(DRAFTERS)):  # a broken rule shows within some of these
            found.compare_texts(asker(client, pool), random, number)
            if number + 1 >= len(DRAFTERS) and (rule is None or found.texts_differ[rule]):
                break
    assert found.texts >= 15
    assert set(+found.texts_differ) == ({rule} if rule else set())


def test_the_filter_oracle_agrees_with_the_filters():
    """150 drawn filters, among them negations, combinations and ranges that end at values."""
    items, random = read_items(shared_bundle()), np.random.default_rng(0)
    filters = ItemFilters(Bundle.open(shared_bundle()).catalog().items)
    operators = set()
    for _ in range(150):
        tree = draw_filter(items, random)
        operators |= set(tree)
        assert filters.evaluate(tree).tolist() == [fits(row, tree) for row in items.values()]
    assert operators == {"and", "or", "not", "eq", "in", "range"}


@pytest.mark.slow
def test_r13(tmp_path):
    found = failing(lossless(BrokenSite(tmp_path, "accepted_tails"), Budget(0.0)))
    assert found == {"texts by rejection or block verification that differ"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "check, figure",
    [
        (poison, "neighbours' items that their filter does not allow"),
        (api, "items in filtered slates that the filter does not allow"),
    ],
)
def test_r7_and_r10(check, figure, tmp_path):
    assert failing(check(BrokenSite(tmp_path, "leaking_filters"), Budget(0.0))) == {figure}
