from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.cases import leave_one_out_cases
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.evaluation.slates import (
    SlateOptions,
    Slates,
    dense_slates,
)
from recserve.evaluation.untrained import UNTRAINED
from recserve.models.attention import DenseAttention
from recserve.models.recommender import Recommender
from recserve.training.baselines import compare_with_baselines
from recserve.training.options import TrainOptions
from recserve.training.recommender.objectives import Objective
from recserve.training.recommender.recommender import (
    CODES,
    ITEMS,
    RecommenderTrainee,
    train_recommender,
)
from recserve.training.recommender.sasrec import PLAIN, train_sasrec
from recserve.training.schedule import Schedule
from tests.support.grids import chosen
from tests.support.history_bonuses import bonus_by_hand, bonus_of
from tests.support.shared_folders import shared_folder

CPU = TrainOptions(device="cpu", precision="float32")
SMALL = {"hidden_size": 32, "num_heads": 2, "num_layers": 1, "intermediate_size": 64}


def make_ring(folder: Path) -> None:
    """60 items in a ring; each of 80 users walks along it, so that the next item is certain."""
    items = [f"i{row:02}" for row in range(60)]
    words = [f"word{row // 6} item{row % 6}" for row in range(60)]
    pq.write_table(pa.table({"item_id": items, "title": words}), folder / "items.parquet")
    noise = np.random.default_rng(0)
    events: dict[str, list[object]] = {"user_id": [], "item_id": [], "position": []}
    for user in range(80):
        start, length = noise.integers(60), noise.integers(5, 12)
        for step in range(length):
            events["user_id"].append(f"u{user:02}")
            events["item_id"].append(items[(start + step) % 60])
            events["position"].append(step)
    pq.write_table(pa.table(events), folder / "events.parquet")
    build_bundle(
        BuildOptions(
            folder / "items.parquet",
            folder / "events.parquet",
            folder / "bundle",
            levels=2,
            codes=8,
            text_dim=16,
            collaborative_dim=16,
        ),
        log=lambda line: None,
    )


@pytest.fixture(scope="module")
def built() -> Path:
    return shared_folder("ring", make_ring) / "bundle"


def model_of(bundle: Bundle, **values: object) -> RecommenderTrainee:
    recipe = replace(ITEMS, **SMALL, **values)
    trainee = RecommenderTrainee(recipe, bundle.catalog(), bundle.events(), 0, torch.device("cpu"))
    for parameter in trainee.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return trainee


def brute_force(trainee: RecommenderTrainee, history: np.ndarray, weight: float) -> np.ndarray:
    """[I] score of every item after a history, each by itself and by the definition."""
    model: Recommender = trainee.model.eval()
    codes = torch.from_numpy(trainee.codes.astype(np.int64))
    start = model.config.num_code_tokens
    root = [0, *(start + int(row) for row in history)]
    scores = np.zeros(len(codes))
    with torch.no_grad():
        for row, path in enumerate(codes):
            tokens = torch.tensor([[*root, *model.item_tokens[row, :-1].tolist()]])
            hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())[0]
            for level, code in enumerate(path):
                peers = codes[(codes[:, :level] == path[:level]).all(1), level].unique()
                logits = model.level_logits(hidden[len(root) - 1 + level][None], level)[0]
                scores[row] += float(logits[code] - logits[peers].logsumexp(0))
        dense = model.dense_scores(hidden[len(root) - 1][None])[0].numpy()
    return scores + weight * dense


@pytest.mark.parametrize("repeat", [None, -3.0, 2.0], ids=lambda value: f"bonus-{value}")
@pytest.mark.parametrize("filtered", [False, True], ids=["kept", "filtered"])
def test_slates_of_a_wide_beam_equal_brute_force(
    built: Path, filtered: bool, repeat: float | None
) -> None:
    """Beam 60 over 60 items misses nothing, so the slate is the order of all scores."""
    trainee = model_of(Bundle.open(built))
    cases = trainee.cases
    noise = np.random.default_rng(7)
    links = noise.random((60, 60)) * 20 * (noise.random((60, 60)) < 0.2)
    if repeat is not None:
        trainee.model.history_bonus = bonus_of(links, repeat)
    slates = Slates(trainee.model.eval(), trainee.trie, trainee.codes)
    got = slates(cases, np.arange(3), 8, SlateOptions(60, filtered, 0.5))
    for case in range(3):
        scores = brute_force(trainee, cases.history(case), 0.5)
        if repeat is not None:
            scores += 0.5 * bonus_by_hand(links, repeat, cases.history(case), 60)
        if filtered:
            scores[cases.history(case)] = -np.inf
        assert got[case].tolist() == np.argsort(-scores)[:8].tolist()


def test_dense_slates_follow_the_dense_scores(built: Path) -> None:
    trainee = model_of(Bundle.open(built))
    model, cases = trainee.model.eval(), trainee.cases
    got = dense_slates(model, trainee.codes, cases, np.arange(5), 60, False)
    for case in range(5):
        tokens = torch.from_numpy(cases.history(case) + model.config.num_code_tokens)
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])[None]
        with torch.no_grad():
            hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())[0, -1:]
            order = model.dense_scores(hidden)[0].argsort(descending=True)
        assert got[case].tolist() == order.tolist()
    filtered = dense_slates(model, trainee.codes, cases, np.arange(5), 8, True)
    for case in range(5):
        assert not set(filtered[case]) & set(cases.history(case).tolist())


def test_cases_hold_out_the_last_two_events(built: Path) -> None:
    events = Bundle.open(built).events()
    valid, test = (leave_one_out_cases(events, split) for split in ("valid", "test"))
    rows = events.item_rows[events.offsets[4] : events.offsets[5]].tolist()
    assert valid.history(4).tolist() == rows[:-2] and valid.held[4] == rows[-2]
    assert test.history(4).tolist() == rows[:-1] and test.held[4] == rows[-1]
    assert len(valid.sample(7)) == 7
    np.testing.assert_array_equal(valid.sample(7).held, valid.sample(7).held)
    with pytest.raises(ValueError, match="split is 'train'"):
        leave_one_out_cases(events, "train")


@pytest.mark.parametrize("input", chosen(("items", "codes"), "items"))
def test_training_learns_the_ring_and_the_bundle_keeps_it(
    built: Path, copied: Callable[[Path], Path], input: str, pictures: None
) -> None:
    path = copied(built)
    bundle = Bundle.open(path)
    recipe = replace(
        ITEMS if input == "items" else CODES,
        **SMALL,
        dropout=0.0,
        objective=Objective(0.0, input == "items", 0.5 if input == "items" else 0.0, 0.1),
        schedule=Schedule(16, 1e-2, 0.01),
        max_nodes=256,
    )
    report = train_recommender(bundle, CPU, recipe, Console(quiet=True))
    assert report.metrics["ndcg@10"] > 0.9
    opened = Bundle.open(path)
    opened.verify()
    assert opened.manifest.recommender["input"] == input
    evaluation = evaluate_bundle(opened, EvaluationOptions(strategy="beam", k=(1, 10), width=20))
    assert evaluation.columns["filtered"]["recall@1"] > 0.8
    assert evaluation.users == 80
    assert "recall@1" in str(evaluation) and "filtered" in str(evaluation)
    few = evaluate_bundle(opened, EvaluationOptions(strategy="auto", k=(5,), users=20))
    assert few.users == 20 and few.strategy.startswith("auto (" if input == "items" else "beam")
    assert (path / "recommender" / "training.png").exists()


def test_sasrec_learns_the_ring(built: Path, copied: Callable[[Path], Path]) -> None:
    bundle = Bundle.open(copied(built))
    with pytest.raises(BundleError, match="no sasrec was trained"):
        evaluate_bundle(bundle, EvaluationOptions(strategy="sasrec"))
    recipe = replace(
        PLAIN, hidden_size=32, dropout=0.0, schedule=Schedule(40, 1e-2, 0.01), max_nodes=128
    )
    train_sasrec(bundle, CPU, recipe, Console(quiet=True))
    evaluation = evaluate_bundle(bundle, EvaluationOptions(strategy="sasrec", k=(1, 10)))
    assert evaluation.columns["kept"]["recall@10"] > 0.8
    assert evaluation.dense_weight == 0.0


def test_popularity_counts_training_events_only(built: Path) -> None:
    """Compared with a count by hand, user by user."""
    bundle = Bundle.open(built)
    events = bundle.events()
    cases = leave_one_out_cases(events, "test")
    counts = np.zeros(60)
    for case in range(len(cases)):
        np.add.at(counts, cases.history(case)[:-1], 1)  # the last one is the validation's
    order = np.argsort(-counts, kind="stable").tolist()
    hits = {"kept": 0, "filtered": 0}
    for case in range(len(cases)):
        unseen = [row for row in order if row not in cases.history(case)]
        hits["kept"] += int(cases.held[case]) in order[:7]
        hits["filtered"] += int(cases.held[case]) in unseen[:7]
    found = evaluate_bundle(bundle, EvaluationOptions(strategy="popularity", k=(7,)))
    assert (found.model, found.users) == ("popularity", len(cases))
    for column, number in hits.items():
        assert found.columns[column]["recall@7"] == pytest.approx(number / len(cases))
    assert hits["filtered"] > hits["kept"] > 0


def test_baselines_stand_beside_the_model(built: Path, copied: Callable[[Path], Path]) -> None:
    """A SASRec that is missing is trained elsewhere; one of the bundle is used."""
    path = copied(built)
    bundle = Bundle.open(path)
    options = EvaluationOptions(strategy="beam", k=(1, 10), width=20, users=30)
    with pytest.raises(BundleError, match="no recommender was trained"):
        compare_with_baselines(bundle, options)
    small = replace(ITEMS, **SMALL, schedule=Schedule(1, 1e-2), max_nodes=256)
    train_recommender(bundle, CPU, small, Console(quiet=True))
    before = sorted((file, file.stat().st_mtime_ns) for file in path.rglob("*"))
    recipe = replace(PLAIN, hidden_size=16, schedule=Schedule(1, 1e-2))
    quiet = Console(quiet=True)
    compared = compare_with_baselines(bundle, options, recipe, quiet)
    assert sorted((file, file.stat().st_mtime_ns) for file in path.rglob("*")) == before
    untrained = {each.label for name, each in UNTRAINED.items() if name != "popularity_week"}
    assert compared.trained and set(compared.baselines) == untrained | {"sasrec, ids"}
    assert set(compared.omitted) == {"popularity of the last week"}
    assert compared.model.columns == evaluate_bundle(bundle, options).columns
    shown = str(compared)
    assert (
        shown.count(" kept ") == shown.count(" filtered ") == 6 and "--ids-only` keeps it" in shown
    )
    baselines = compared.to_dict()["baselines"]
    assert {found["users"] for found in baselines.values()} == {30}

    train_sasrec(bundle, CPU, replace(recipe, item_vectors=True), quiet)
    compared = compare_with_baselines(bundle, options, recipe, quiet)
    assert not compared.trained and "--ids-only" not in str(compared)
    of_bundle = evaluate_bundle(bundle, replace(options, strategy="sasrec"))
    assert compared.baselines["sasrec, ids and item vectors"].columns == of_bundle.columns
    alone = compare_with_baselines(bundle, replace(options, strategy="sasrec"), recipe, quiet)
    assert set(alone.baselines) == untrained


def test_evaluation_refuses(built: Path) -> None:
    bundle = Bundle.open(built)
    with pytest.raises(ValueError, match="strategy is 'greedy'; choose one of"):
        EvaluationOptions(strategy="greedy")
    with pytest.raises(ValueError, match=r"k is \(5, 100\); cut-offs lie between 1 and"):
        EvaluationOptions(strategy="beam", k=(5, 100))
    with pytest.raises(BundleError, match="no recommender was trained"):
        evaluate_bundle(bundle)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a bundle, so that a test may train in it."""
    import shutil

    count = iter(range(100))

    def copy(path: Path) -> Path:
        return Path(shutil.copytree(path, tmp_path / f"bundle{next(count)}"))

    return copy
