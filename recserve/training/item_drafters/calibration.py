"""Calibration of a draft head: each draft margin is measured on validation users."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.cases import Cases
from recserve.evaluation.slates import SlateOptions, Slates
from recserve.kernels.trie.trie import Trie
from recserve.models.item_heads import (
    Calibration,
    DraftPlan,
    SelfDraftHead,
    load_self_draft,
    save_self_draft,
)
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.strategies.speculative import SpeculativeStrategy
from recserve.search.strategy import Heads
from recserve.training.recommender.frozen_recommender import FrozenRecommender
from recserve.training.time_limit import NO_LIMIT, TimeLimit

BEAM_SIZES = ((10, 10), (50, 10), (50, 50), (200, 10), (200, 200))  # beam width and k
MARGINS = (0.0, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0)
USERS = 100
SUFFICIENT_SHARE = 0.98  # share of slates proved in one round at which no wider margin is tried


def calibrate(
    head: SelfDraftHead,
    target: SemanticIdModel,
    trie: Trie,
    codes: NDArray[np.generic],
    cases: Cases,
    limit: TimeLimit = NO_LIMIT,
) -> Calibration | None:
    """Measures the draft plans of each beam width and k in BEAM_SIZES.

    A plan is a margin with its measured cost: nodes, extra rounds and the share of slates that are
    proved in one round.

    Args:
        head: The draft head.
        target: The recommender that it drafts for.
        trie: Trie of the semantic ids.
        codes: [I, L] semantic ids of the items.
        cases: Validation users, of whom at most USERS are used.
        limit: Time limit. A size is left out if it ends before all its margins are measured.

    Returns:
        The measured plans; None if the time suffices for no size.
    """
    cases = cases.sample(USERS)
    slates = Slates(target, trie, codes, Heads(head))
    plans: dict[tuple[int, int], tuple[DraftPlan, ...]] = {}
    for width, k in BEAM_SIZES:
        found: list[DraftPlan] = []
        for margin in MARGINS:
            if found and found[-1].margin and found[-1].proved >= SUFFICIENT_SHARE:
                break
            if limit.is_over:
                return Calibration(plans) if plans else None
            plan = DraftPlan(margin, 0.0, 0.0, 1.0)
            slates.engine.add_strategy(
                "speculative", SpeculativeStrategy(target, head, plan, caches=False)
            )
            found.append(_measure_plan(plan, slates, cases, width, k))
        plans[width, k] = tuple(found)
    return Calibration(plans)


def recalibrate(bundle: Bundle, device: torch.device) -> Calibration:
    """Calibrates the bundle's current draft head and records the result in the bundle.

    Raises:
        BundleError: If the bundle has no recommender or no draft head.
    """
    section = "drafters/speculative"
    frozen = FrozenRecommender.open(bundle, device)
    if not bundle.has(section):
        raise BundleError(f"{bundle.root}: no draft head; run `recserve train drafter` first")
    directory = bundle.directory(section)
    head = load_self_draft(directory, frozen.model)
    with torch.no_grad():
        found = calibrate(head, frozen.model, frozen.trie, frozen.codes, frozen.cases)
    assert found is not None  # without a limit all sizes are measured
    head.calibration = found
    save_self_draft(head, directory)
    bundle.commit(section, bundle.manifest.sections[section])
    return found


def _measure_plan(plan: DraftPlan, slates: Slates, cases: Cases, width: int, k: int) -> DraftPlan:
    """Returns the plan with the cost that was measured on these cases."""
    options = SlateOptions(width, strategy="speculative")
    answers = [
        answer
        for which in cases.batches(slates.engine.config.max_running)
        for answer in slates.answers(cases, which, k, options)
    ]
    rounds = np.array([answer.rounds for answer in answers])
    return DraftPlan(
        plan.margin,
        float(np.mean([answer.timing.nodes for answer in answers])),
        float(np.maximum(rounds - 1, 0).mean()),
        float((rounds <= 1).mean()),
    )
