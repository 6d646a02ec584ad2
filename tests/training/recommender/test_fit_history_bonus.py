"""The history bonus is fitted on training events and validation users."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.bundle.bundle import Bundle
from recserve.evaluation.bundle_slates import BundleSlates
from recserve.evaluation.cases import leave_one_out_cases
from recserve.evaluation.slates import dense_log_p
from recserve.features.tables.events import EventLog
from recserve.models.history_bonus import HistoryBonus
from recserve.training.recommender.fit_history_bonus import (
    DISTANCE,
    MAX_LINKS,
    fit_history_bonus,
    link_items,
)
from tests.support.history_bonuses import bonus_by_hand
from tests.support.tiny_bundle import NUM_ITEMS, shared_bundle


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(shared_bundle())


@pytest.fixture(scope="module")
def slates(bundle: Bundle) -> BundleSlates:
    return BundleSlates.open(bundle)


def table_of(bonus: HistoryBonus) -> np.ndarray:
    """[I, I] links."""
    table = np.zeros((bonus.num_items, bonus.num_items))
    items = np.repeat(np.arange(bonus.num_items), np.diff(bonus.offsets))
    table[items, bonus.rows] = bonus.links
    return table


def count_by_hand(events: EventLog) -> np.ndarray:
    """[I, I] links of the training events, pair by pair."""
    sums = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for start, stop in zip(events.offsets[:-1], events.offsets[1:], strict=True):
        rows = events.item_rows[start:stop].tolist()
        for first in range(len(rows)):
            for second in range(first + 1, min(first + DISTANCE + 1, len(rows))):
                weight = 1 if events.weights is None else events.weights[start + second]
                sums[rows[first], rows[second]] += weight / (second - first)
    return np.log1p(sums)


@pytest.mark.parametrize("weighted", [False, True])
def test_links_count_the_pairs_of_training_events(bundle: Bundle, weighted: bool) -> None:
    """Each pair counts the weight of its later event."""
    train = bundle.events().leave_one_out().train
    if weighted:
        drawn = np.random.default_rng(2).choice([0, 0.5, 3], train.num_events)
        train = replace(train, weights=drawn.astype(np.float32))
    by_hand = count_by_hand(train)
    assert (by_hand > 0).sum(1).max() <= MAX_LINKS
    np.testing.assert_allclose(table_of(link_items(train, NUM_ITEMS)), by_hand, atol=1e-6)


def test_an_item_keeps_its_strongest_links(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    train = bundle.events().leave_one_out().train
    by_hand = count_by_hand(train)
    monkeypatch.setattr("recserve.training.recommender.fit_history_bonus.MAX_LINKS", 3)
    kept = link_items(train, NUM_ITEMS)
    assert np.diff(kept.offsets).max() == 3
    for item, row in enumerate(table_of(kept)):
        strongest = np.sort(by_hand[item])[::-1][:3]
        np.testing.assert_allclose(np.sort(row)[::-1][:3], strongest, atol=1e-6)


def gain(slates: BundleSlates, events: EventLog, bonus: HistoryBonus, filtered: bool) -> float:
    """NDCG@10 on validation, user by user."""
    cases = leave_one_out_cases(events, "valid")
    dense = dense_log_p(slates.slates.model, slates.slates.codes, cases, np.arange(len(cases)))
    table, gains = table_of(bonus), []
    for case, scores in enumerate(dense):
        history = cases.history(case)
        scores = scores + bonus_by_hand(table, bonus.repeat, history, NUM_ITEMS)
        if filtered:
            scores[history] = -np.inf
        slate = np.argsort(-scores)[:10].tolist()
        held = int(cases.held[case])
        known = held in slate and scores[held] > -np.inf
        gains.append(1 / math.log2(slate.index(held) + 2) if known else 0.0)
    return float(np.mean(gains))


@pytest.mark.parametrize("repeats", [False, True], ids=["new items", "the same items again"])
def test_the_fit_is_the_best_of_its_figures(
    bundle: Bundle, slates: BundleSlates, repeats: bool
) -> None:
    """Users who buy two items in turn get them again; users who never do so get other items."""
    events = bundle.events()
    if repeats:
        first = events.offsets[:-1][events.user_indices()]
        turn = (np.arange(events.num_events) - first) % 2
        events = replace(events, item_rows=events.item_rows[first + turn])
    model, codes = slates.slates.model, slates.slates.codes
    fitted = fit_history_bonus(model, codes, events)
    assert fitted.users == len(leave_one_out_cases(events, "valid"))
    assert fitted.filtered[fitted.factor] == max(fitted.filtered.values())
    assert fitted.kept[fitted.repeat] == max(fitted.kept.values())
    assert (fitted.repeat > 0) if repeats else (fitted.repeat <= 0)
    plain = link_items(events.leave_one_out().train, NUM_ITEMS)
    for factor, found in fitted.filtered.items():
        linked = replace(plain, links=plain.links * np.float32(factor))
        assert found == pytest.approx(gain(slates, events, linked, True), abs=1e-6)
    linked = replace(plain, links=plain.links * np.float32(fitted.factor))
    for repeat, found in fitted.kept.items():
        again = replace(linked, repeat=repeat)
        assert found == pytest.approx(gain(slates, events, again, False), abs=1e-6)
    assert torch.is_grad_enabled() and model.history_bonus is None  # nothing is left behind
