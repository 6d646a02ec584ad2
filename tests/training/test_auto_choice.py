"""`auto` serves what validation has chosen, apart for requests that keep and filter seen items."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET
from numpy.typing import NDArray
from rich.console import Console

from recserve.batch.together import together
from recserve.bundle.bundle import Bundle, BundleError, Manifest
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.evaluation.intervals import Figure
from recserve.schemas.items import Exclusions, RecommendRequest, RecommendResponse
from recserve.service import Service
from recserve.service.auto_strategy import read_auto
from recserve.training.auto_choice import Candidate, Goal, choose_auto, take
from tests.support.tiny_bundle import shared_bundle

CHOSEN = {
    "kept": {"strategy": "nezha", "dense_weight": 5.0},
    "filtered": {"strategy": "beam", "dense_weight": 20.0},
}


@pytest.fixture(autouse=True)
def few_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recserve.training.auto_choice.WEIGHTS", (0.0, 2.0, 20.0))


def copy_bundle(folder: Path) -> Bundle:
    return Bundle.open(shutil.copytree(shared_bundle(), folder / "bundle"))


def record(bundle: Bundle, auto: object) -> None:
    bundle.commit("recommender", bundle.manifest.recommender | {"auto": auto})


def test_the_choice_is_the_best_of_its_evidence(tmp_path: Path) -> None:
    """Recomputed with `evaluate`, which then shows and measures what a server serves."""
    bundle = copy_bundle(tmp_path)
    version = bundle.manifest.model_version
    quiet = Console(quiet=True)
    choices = choose_auto(bundle, "quality", users=25, timed_users=3, console=quiet)
    opened = Bundle.open(bundle.root)
    opened.verify()
    assert opened.manifest.model_version != version
    assert set(choices) == set(read_auto(opened.manifest.recommender)) == {"kept", "filtered"}
    evidence = opened.manifest.recommender["auto_evidence"]
    for column, choice in choices.items():
        assert choice.users == 25
        best, chosen = choice.candidates[0], choice.chosen
        assert chosen.strategy == best.strategy and chosen in choice.candidates
        values = [each.ndcg.value for each in choice.candidates]
        assert values == sorted(values, reverse=True)
        assert {each.strategy for each in choice.candidates} >= {"beam", "nezha"}
        assert {e.dense_weight for e in choice.candidates if e.strategy == "beam"} >= {0.0, 2.0}
        for each in (choice.candidates[0], choice.candidates[-1]):
            assert each.behind.value == pytest.approx(values[0] - each.ndcg.value)
            assert each.ms.low <= each.ms.value <= each.ms.high
            options = EvaluationOptions("valid", each.strategy, (10,), 50, users=25)
            options = replace(options, dense_weight=each.dense_weight)
            found = evaluate_bundle(opened, options).columns[column]["ndcg@10"]
            assert found == pytest.approx(each.ndcg.value)
        assert evidence[column]["candidates"][0]["ndcg"]["value"] == values[0]
    measured = evaluate_bundle(opened, EvaluationOptions("valid", "auto", (10,), 50, users=25))
    for column, choice in choices.items():
        assert measured.columns[column]["ndcg@10"] == pytest.approx(choice.chosen.ndcg.value)
        assert f"{column}: {choice.chosen.strategy}, dense weight" in measured.strategy


def candidates(
    *given: tuple[str, float, float, float],
) -> tuple[list[Candidate], list[NDArray[np.float64]]]:
    """Candidates of a strategy, a weight, a mean NDCG and a time, with noise among users."""
    noise = np.random.default_rng(0)
    users = noise.random(400)
    found, gains = [], []
    for strategy, weight, ndcg, ms in given:
        own = noise.normal(0, 0.1, 400)
        gains.append(users + own - own.mean() + ndcg)
        figures = [Figure(value, value, value) for value in (ndcg, 0.0, ms)]
        found.append(Candidate(strategy, weight, *figures))
    return found, gains


@pytest.mark.parametrize("goal", ["quality", "latency"])
def test_the_middle_of_the_weights_that_are_near_the_best_is_taken(goal: Goal) -> None:
    """One standard error is .007. The best weight is an outer one by chance."""
    found, gains = candidates(
        ("beam", 0.0, -0.05, 1.0),
        ("beam", 20.0, -0.002, 4.0),
        ("beam", 0.5, 0.0, 2.0),
        ("beam", 5.0, -0.001, 3.0),
        ("beam", 100.0, -0.04, 1.0),
    )
    assert found[take(goal, found, gains)].dense_weight == 5.0
    two, gains = candidates(("beam", 1.0, 0.0, 1.0), ("beam", 2.0, -0.001, 1.0))
    assert two[take(goal, two, gains)].dense_weight == 2.0
    one, gains = candidates(("beam", 1.0, -0.05, 1.0), ("beam", 2.0, 0.0, 2.0))
    assert one[take(goal, one, gains)].dense_weight == 2.0


def test_the_goal_decides_the_strategy() -> None:
    found, gains = candidates(
        ("beam", 2.0, 0.0, 5.0),
        ("nezha", 2.0, -0.003, 2.0),
        ("nezha", 5.0, -0.001, 1.5),
        ("nezha", 20.0, -0.05, 1.0),
        ("dense", 0.0, -0.04, 0.5),
    )
    assert found[take("quality", found, gains)].strategy == "beam"
    assert take("latency", found, gains) == 2


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    bundle = copy_bundle(tmp_path)
    record(bundle, CHOSEN)
    with Service.open(bundle.root, f"lmdb:{tmp_path}/store", "cpu") as opened:
        yield opened


def test_a_server_serves_the_choice(service: Service) -> None:
    history = list(service.catalog.current.catalog.items.ids[:6])

    def answer(**fields: object) -> RecommendResponse:
        body = RecommendRequest(history=history, k=8, **fields)  # type: ignore[arg-type]
        return service.recommender.begin(body).wait()

    def shown(found: RecommendResponse) -> list[tuple[str, float]]:
        return [(item.item_id, item.score) for item in found.items]

    kept = Exclusions(seen=False)
    explicit = answer(exclude=kept, strategy="nezha", dense_weight=5.0)
    auto = answer(exclude=kept)
    assert auto.strategy == "nezha" and shown(auto) == shown(explicit)
    filtered = answer()
    assert filtered.exact and filtered.strategy in ("beam", "speculative")
    assert [i for i, _ in shown(filtered)] == [
        i for i, _ in shown(answer(strategy="beam", dense_weight=20.0))
    ]
    # A request that sets the weight has chosen, and so has one that names the strategy.
    own = answer(exclude=kept, dense_weight=0.0)
    assert own.exact and [i for i, _ in shown(own)] == [
        i for i, _ in shown(answer(exclude=kept, strategy="beam", dense_weight=0.0))
    ]
    named = answer(exclude=kept, strategy="nezha")
    assert shown(named) != shown(explicit)  # the bundle's weight
    bodies = [RecommendRequest(history=history, k=8, exclude=e) for e in (kept, Exclusions())]
    batch = together(service)(bodies)
    assert [found.strategy for found in batch if isinstance(found, RecommendResponse)] == [
        "nezha",
        "beam",
    ]


def test_an_answer_names_the_weight_that_gives_it_again(service: Service) -> None:
    """Other answers of the server than those of the dense head name none."""
    history = list(service.catalog.current.catalog.items.ids[:6])

    def answer(**fields: object) -> RecommendResponse:
        body = RecommendRequest(history=history, k=8, **fields)  # type: ignore[arg-type]
        return service.recommender.begin(body).wait()

    weights = set()
    for exclude in (Exclusions(seen=False), Exclusions()):
        for fields in ({}, {"dense_weight": 3.0}, {"strategy": "nezha"}, {"strategy": "beam"}):
            first = answer(exclude=exclude, **fields)
            again = answer(
                exclude=exclude, strategy=first.strategy, dense_weight=first.dense_weight
            )
            assert again.items == first.items and again.dense_weight == first.dense_weight
            weights.add(first.dense_weight)
    assert weights == {5.0, 20.0, 3.0, 0.0}
    for strategy in ("popular", "latest"):
        assert answer(strategy=strategy).dense_weight is UNSET


@pytest.mark.parametrize(
    "auto",
    [
        [],
        {"kept": CHOSEN["kept"]},
        {**CHOSEN, "other": CHOSEN["kept"]},
        {**CHOSEN, "kept": 3},
        {**CHOSEN, "kept": {"strategy": 1, "dense_weight": 1}},
        {**CHOSEN, "kept": {"strategy": "beam", "dense_weight": -1}},
        {**CHOSEN, "kept": {"strategy": "beam", "dense_weight": True}},
        {**CHOSEN, "kept": {"strategy": "beam", "dense_weight": float("nan")}},
        {**CHOSEN, "kept": {"strategy": "beam"}},
    ],
)
def test_a_damaged_choice_is_refused(auto: object) -> None:
    manifest = Manifest("c", {}, {"recommender": {"auto": auto}})
    with pytest.raises(BundleError, match=r"manifest\.json: recommender\.auto is"):
        Manifest.from_json(manifest.to_json().encode())


def test_a_strategy_that_is_gone_leaves_auto_as_it_was(tmp_path: Path) -> None:
    bundle = copy_bundle(tmp_path)
    record(bundle, {**CHOSEN, "filtered": {"strategy": "gone", "dense_weight": 1.0}})
    with Service.open(bundle.root, f"lmdb:{tmp_path}/store", "cpu") as service:
        history = list(service.catalog.current.catalog.items.ids[:6])
        assert service.recommender.begin(RecommendRequest(history=history, k=3)).wait().exact
