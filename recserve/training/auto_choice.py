"""Chooses what `auto` serves, on validation users.

    recserve bundle calibrate BUNDLE --auto-for quality|latency

Each candidate is a strategy with a weight of the dense head. The best few differ by less than the
error of 2,000 users. So the choice is the middle of their weights, and not the one that is best by
chance: on test, an outer weight cost up to .0021 of NDCG@10 (docs/results/quality.md). Requests
that keep seen items and requests that filter them are chosen for separately. The bundle stores the
choice and its evidence. The training of a recommender ends with the choice among the weights of
beam search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from recserve.bundle.bundle import Bundle
from recserve.evaluation.accuracy import ranks_of, user_metrics
from recserve.evaluation.bundle_slates import BundleSlates
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.evaluation import COLUMNS, make_slates
from recserve.evaluation.fidelity import measure_times
from recserve.evaluation.intervals import (
    Figure,
    difference_interval,
    mean_interval,
    quantile_interval,
)
from recserve.search.strategy import strategy_classes
from recserve.service.auto_strategy import BEAM, StrategyChooser
from recserve.training.time_limit import NO_LIMIT, TimeLimit

WEIGHTS = (0.0, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0)
K, WIDTH = 10, 50
USERS, TIMED_USERS = 2000, 50
GROUP = 64  # users between two looks at the time limit
Goal = Literal["quality", "latency"]


@dataclass(frozen=True)
class Candidate:
    """A strategy with a weight, as measured on validation users.

    Attributes:
        strategy: Name of the strategy.
        dense_weight: Weight of the dense head.
        ndcg: NDCG@10.
        behind: How far its NDCG@10 is behind the best candidate's, on the same users.
        ms: Median time of one request at a time, with its prefix cached; None if none was timed.
        near: True if it is at most one standard error of the difference behind the best candidate.
    """

    strategy: str
    dense_weight: float
    ndcg: Figure
    behind: Figure
    ms: Figure | None
    near: bool = False

    def __str__(self) -> str:
        time = "" if self.ms is None else f", {self.ms.value:.1f} ms"
        return f"{self.strategy}, dense weight {self.dense_weight:g}: NDCG@{K} {self.ndcg}{time}"


@dataclass(frozen=True)
class AutoChoice:
    """What `auto` serves for one treatment of seen items.

    Attributes:
        goal: `quality` took the strategy with the highest NDCG@10. `latency` took that of the
            fastest candidate that is at most one standard error behind it.
        users: Number of validation users.
        chosen: The chosen candidate: of the strategy's weights that are at most one standard error
            behind the best candidate, the middle one.
        candidates: All candidates, best first.
    """

    goal: Goal
    users: int
    chosen: Candidate
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        weights = sorted(
            one.dense_weight
            for one in self.candidates
            if one.near and one.strategy == self.chosen.strategy
        )
        listed = ", ".join(f"{weight:g}" for weight in weights)
        return (
            f"{self.chosen} on {self.users} validation users; best: {self.candidates[0]}. "
            f"At most one standard error of the difference behind it, on the same users: weights "
            f"{listed}. The middle is taken, of two the larger"
        )


def choose_auto(
    bundle: Bundle,
    goal: Goal,
    device: torch.device | str = "cpu",
    users: int = USERS,
    timed_users: int = TIMED_USERS,
    console: Console | None = None,
    strategies: Sequence[str] | None = None,
    limit: TimeLimit = NO_LIMIT,
) -> dict[str, AutoChoice]:
    """Chooses for `kept` and `filtered`, and records choice and evidence in the bundle.

    With a time limit, as many users are measured as time allows, and all candidates on the same.

    Args:
        bundle: A bundle with a recommender.
        goal: What counts.
        device: Where the model runs.
        users: Maximum number of validation users.
        timed_users: Maximum number of users whose requests are timed. 0 times none, which goal
            `quality` allows.
        console: Where progress is printed; None means standard error.
        strategies: Strategies to choose from; None means all that the bundle has.
        limit: Time limit of the choice. It does not bound the times of requests.

    Returns:
        The choices; empty if the time does not suffice for GROUP users. Nothing is recorded then.

    Raises:
        BundleError: If no recommender was trained.
        ValueError: If the goal is `latency` and no request is timed.
    """
    if goal == "latency" and timed_users < 1:
        raise ValueError(f"timed_users is {timed_users}; goal 'latency' needs at least 1")
    if limit.is_over:
        return {}
    console = console or Console(stderr=True)
    answers = BundleSlates.open(bundle, device)
    cases = leave_one_out_cases(bundle.events(), "valid").sample(users)
    choices: dict[str, AutoChoice] = {}
    for number, column in enumerate(COLUMNS):
        until = limit.part(1 / (len(COLUMNS) - number))
        found = _choose(answers, cases, column, goal, timed_users, console, strategies, until)
        if found is None:
            return {}
        choices[column] = found
    settings = {
        column: {"strategy": each.chosen.strategy, "dense_weight": each.chosen.dense_weight}
        for column, each in choices.items()
    }
    evidence = {column: asdict(each) for column, each in choices.items()}
    section: dict[str, Any] = {"auto": settings, "auto_evidence": evidence}
    bundle.commit("recommender", bundle.manifest.recommender | section)
    return choices


def _choose(
    answers: BundleSlates,
    cases: Cases,
    column: str,
    goal: Goal,
    timed_users: int,
    console: Console,
    strategies: Sequence[str] | None,
    limit: TimeLimit,
) -> AutoChoice | None:
    """Measures all candidates of one column and takes one; None if there is no time for it."""
    candidates = _candidates(answers, strategies)
    groups: list[list[NDArray[np.float64]]] = []
    for group in cases.groups(GROUP) if limit.exists else (cases,):
        measured = []
        for strategy, weight in candidates:
            if limit.is_over:
                break
            measured.append(_gains(answers, group, column, strategy, weight))
            mean = f"NDCG@{K} {measured[-1].mean():.4f} on {len(group)} users"
            console.print(
                f"seen items {column}: {strategy}, dense weight {weight:g}: {mean}", soft_wrap=True
            )
        if len(measured) < len(candidates):
            break
        groups.append(measured)
    if not groups:
        return None
    gains = [np.concatenate(values) for values in zip(*groups, strict=True)]
    found = []
    for (strategy, weight), values in zip(candidates, gains, strict=True):
        options = answers.options(answers.as_served(strategy), WIDTH, column == "filtered", weight)
        ndcg = Figure(float(values.mean()), *mean_interval(values))
        ms = None
        if timed_users:
            # `auto` serves `beam` by the engine's exact strategy, which may draft.
            served = StrategyChooser(answers.slates.engine.selectable).exact
            served = served if strategy == BEAM else strategy
            timed = cases.sample(timed_users)
            _, warm = measure_times(answers, timed, K, replace(options, strategy=served))
            ms = Figure(float(np.median(warm)), *quantile_interval(warm, 0.5))
        found.append(Candidate(strategy, options.dense_weight, ndcg, Figure(0.0, 0.0, 0.0), ms))
        if ms is not None:
            console.print(f"seen items {column}: {found[-1]}", soft_wrap=True)
    best = max(range(len(found)), key=lambda one: gains[one].mean())
    for one, candidate in enumerate(found):
        difference = gains[best] - gains[one]
        behind = Figure(float(difference.mean()), *difference_interval(difference))
        found[one] = replace(candidate, behind=behind)
    near = _near(gains)
    found = [replace(one, near=number in near) for number, one in enumerate(found)]
    chosen = take(goal, found, gains)
    ordered = sorted(found, key=lambda one: -one.ndcg.value)
    return AutoChoice(goal, len(gains[0]), found[chosen], tuple(ordered))


def _gains(
    answers: BundleSlates, cases: Cases, column: str, strategy: str, weight: float
) -> NDArray[np.float64]:
    """Returns NDCG@10 of each user for one candidate."""
    options = answers.options(answers.as_served(strategy), WIDTH, column == "filtered", weight)

    def slates(which: NDArray[np.int64], filtered: bool) -> NDArray[np.int64]:
        return answers.slates(cases, which, K, options)

    label = f"{strategy}, dense weight {weight:g}, seen items {column}"
    made = make_slates(cases, slates, column == "filtered", shown=label)
    return user_metrics(ranks_of(made, cases.held), (K,))[f"ndcg@{K}"]


def take(goal: Goal, found: Sequence[Candidate], gains: Sequence[NDArray[np.float64]]) -> int:
    """Returns the number of the candidate that `auto` serves; see `AutoChoice`.

    Args:
        goal: What counts.
        found: The candidates; for goal `latency` with their times.
        gains: NDCG of each user, for each candidate.
    """
    best = max(gains, key=lambda gain: gain.mean())
    behind = [best - gain for gain in gains]
    near = _near(gains)

    def rank(one: int) -> float:
        ms = found[one].ms
        return ms.value if goal == "latency" and ms is not None else float(behind[one].mean())

    strategy = found[min(near, key=rank)].strategy
    same = [one for one in near if found[one].strategy == strategy]
    same.sort(key=lambda one: found[one].dense_weight)
    return same[len(same) // 2]  # the upper one of two


def _near(gains: Sequence[NDArray[np.float64]]) -> list[int]:
    """Returns the candidates that are at most one standard error behind the best.

    The error is that of the difference on the same users. It is smaller than that of each figure.
    """
    best = max(gains, key=lambda gain: gain.mean())
    behind = [best - gain for gain in gains]
    return [n for n, one in enumerate(behind) if one.mean() <= one.std() / np.sqrt(len(one))]


def _candidates(answers: BundleSlates, strategies: Sequence[str] | None) -> list[tuple[str, float]]:
    """Returns the strategies to choose from, with each weight of the dense head that they can use.

    Strategies that equal `beam` are no candidates of their own.

    Args:
        answers: The bundle's strategies.
        strategies: Names of those to choose from; None means all.
    """
    there = answers.slates.engine.selectable
    weights = WEIGHTS if answers.slates.model.config.dense_head else (0.0,)
    return [
        (name, weight)
        for name, each in strategy_classes().items()
        if name in there and (name == BEAM or not each.exact)
        if strategies is None or name in strategies
        for weight in (weights if each.dense_weight == "used" else (0.0,))
    ]
