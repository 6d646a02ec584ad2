"""The weight of negative events, against a plain loop over users, items and events."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.evaluation.bundle_slates import BundleSlates
from recserve.evaluation.cases import leave_one_out_cases
from recserve.evaluation.slates import dense_log_p
from recserve.features.history.event_kinds import EventKinds
from recserve.features.history.event_weights import EventWeights
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.service.similar import NEAR
from recserve.training.recommender.fit_negative_weight import (
    WEIGHTS,
    disliked_before,
    fit_negative_weight,
)
from tests.support.tiny_bundle import tiny_bundle, with_models

TYPES = ("click", "click", "rating", "hide")
OPTIONS = {
    "event_kinds": EventKinds(negative=("rating<2.5",)),
    "event_weights": EventWeights(("rating<2.5=0.5", "hide=2")),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("negative")
    files = write_synthetic(folder / "data", SyntheticOptions(500, 60, 16, seed=3))
    table, draw = pq.read_table(files.events), random.Random(5)
    columns = {
        "type": pa.array([draw.choice(TYPES) for _ in range(table.num_rows)]),
        "value": pa.array([draw.choice((1.0, 4.0)) for _ in range(table.num_rows)], pa.float32()),
    }
    for name, column in columns.items():
        if name in table.column_names:
            table = table.drop_columns(name)
        table = table.append_column(name, column)
    pq.write_table(table, files.events)
    options = BuildOptions(files.items, files.events, folder / "b", levels=2, codes=16, **OPTIONS)
    build_bundle(options, log=lambda _: None)
    return Bundle.open(with_models(folder / "b", ranker=False))


def weight_by_hand(kind: str, value: float) -> float:
    """The weight of a negative event; 0 for a positive one."""
    return 2.0 if kind == "hide" else 0.5 if kind == "rating" and value < 2.5 else 0.0


def test_the_weight_is_the_best_of_a_plain_loop(bundle: Bundle) -> None:
    slates = BundleSlates.open(bundle).slates
    events, catalog = bundle.all_events(), bundle.catalog()
    vectors = catalog.vectors
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cases = leave_one_out_cases(bundle.events(), "valid")
    by_user = {user_id: number for number, user_id in enumerate(events.user_ids)}
    gains: dict[float, list[float]] = {weight: [] for weight in WEIGHTS}
    found = disliked_before(bundle)
    held_before = dict(zip(found.cases.users.tolist(), found.rows, strict=True))
    for case in range(len(cases)):
        user = by_user[cases.user_id(case) or ""]
        start, stop = events.offsets[user : user + 2]
        kinds = [events.type_names[t] for t in events.types[start:stop]]
        wanted = [
            (int(row), weight_by_hand(kind, float(value)))
            for row, kind, value in zip(
                events.item_rows[start:stop], kinds, events.values[start:stop], strict=True
            )
        ]
        positive = [place for place, (_, weight) in enumerate(wanted) if not weight]
        before = wanted[: positive[-2]]  # the last two positive events are held out
        disliked = {row: weight for row, weight in before}
        disliked = {row: weight for row, weight in disliked.items() if weight}
        number = int(cases.users[case])
        assert set(disliked) == set(held_before.get(number, np.zeros(0)).tolist())
        if not disliked:
            continue
        scores = dense_log_p(slates.model, slates.codes, cases, np.array([case]))[0].astype(float)
        scores[cases.history(case)] = -np.inf
        held = int(cases.held[case])
        scores[[row for row in disliked if row != held]] = -np.inf
        for weight in WEIGHTS:
            amounts = np.zeros(len(scores))
            for row, own in disliked.items():
                near = np.argsort(-(unit @ unit[row]))[:NEAR]
                amounts[near] = np.maximum(amounts[near], weight * own * (unit @ unit[row])[near])
            lowered = scores - amounts
            rank = int((lowered > lowered[held]).sum())
            gains[weight].append(1 / np.log2(rank + 2) if rank < 10 else 0.0)
    with torch.no_grad():
        fitted = fit_negative_weight(slates.model, bundle, None)
    assert fitted is not None and fitted.users == len(gains[0.0]) > 20
    for weight, each in gains.items():
        assert fitted.ndcg[weight] == pytest.approx(float(np.mean(each)), abs=1e-4)
    assert fitted.ndcg[fitted.weight] == max(fitted.ndcg.values())


def test_without_negative_events_there_is_no_weight(tmp_path: Path) -> None:
    plain = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    plain.commit("build", {**plain.manifest.build, "event_weights": ["hide=2", "purchase=2"]})
    assert fit_negative_weight(BundleSlates.open(plain).slates.model, plain, None) is None
