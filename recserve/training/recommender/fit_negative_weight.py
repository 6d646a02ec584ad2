"""Fits how much a negative event lowers similar items, on validation users with such events.

The model is not changed. The dense head's slates, with the history bonus and without unwanted and
seen items, are measured by the user's next positive event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.bundle.bundle import Bundle
from recserve.evaluation.accuracy import user_metrics
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.slates import dense_log_p, model_window
from recserve.evaluation.untrained import MAX_ENTRIES, hide
from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.versions import first_version
from recserve.features.history.event_kinds import NEGATIVE, POSITIVE
from recserve.features.history.event_weights import disliked_items
from recserve.models.history_bonus import HistoryBonus
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.service.similar import ItemSimilarity
from recserve.training.time_limit import NO_LIMIT, TimeLimit

WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
K = 10
USERS = 2000
GROUP = 64  # users between two looks at the time limit


@dataclass(frozen=True)
class Disliked:
    """Items that users did not want before their held-out event.

    Attributes:
        cases: The leave-one-out cases of users with such items.
        rows: Item rows of each case, newest first.
        weights: Weights of their negative events.
    """

    cases: Cases
    rows: list[NDArray[np.int64]]
    weights: list[NDArray[np.float32]]


@dataclass(frozen=True)
class NegativeFit:
    """A fitted weight with its evidence on validation users.

    Attributes:
        weight: The weight.
        users: Number of validation users with a negative event.
        ndcg: NDCG@10 of the dense head by weight.
    """

    weight: float
    users: int
    ndcg: dict[float, float]

    def evidence(self) -> dict[str, Any]:
        """Returns the figures that the weight was chosen by, for the manifest."""
        return {"users": self.users, "ndcg": {f"{w:g}": gain for w, gain in self.ndcg.items()}}

    def __str__(self) -> str:
        return (
            f"negative events: similar items lowered by {self.weight:g}; NDCG@{K} of the dense "
            f"head on {self.users} validation users with such events: {self.ndcg[0.0]:.4f} to "
            f"{self.ndcg[self.weight]:.4f}"
        )


def disliked_before(bundle: Bundle, split: Literal["valid", "test"] = "valid") -> Disliked:
    """Returns the cases of a split whose users had negative events with a weight before.

    Raises:
        ValueError: If no user has three positive events, or if the split is unknown.
    """
    manifest, events = bundle.manifest, bundle.all_events()
    kinds = manifest.event_kinds.of_events(events.type_names, events.types, events.values)
    columns = events.type_names, events.types, events.values
    weights = manifest.event_weights.of_events(*columns, other=0.0)
    cases = leave_one_out_cases(bundle.events(), split)
    held = np.flatnonzero(kinds == POSITIVE)[cases.stops]  # the held-out events among all
    starts = events.offsets[np.searchsorted(events.offsets, held, side="right") - 1]
    which, rows, amounts = [], [], []
    item_rows = events.item_rows.astype(np.int64)
    for case, (start, stop) in enumerate(zip(starts.tolist(), held.tolist(), strict=True)):
        part = slice(start, stop)
        if (kinds[part] == NEGATIVE).any():
            found, amount = disliked_items(item_rows[part], kinds[part], weights[part])
            if found.size:
                which.append(case)
                rows.append(found)
                amounts.append(amount)
    return Disliked(cases.take(np.array(which, np.int64)), rows, amounts)


def fit_negative_weight(
    model: SemanticIdModel,
    bundle: Bundle,
    bonus: HistoryBonus | None,
    users: int = USERS,
    limit: TimeLimit = NO_LIMIT,
) -> NegativeFit | None:
    """Chooses the weight with the best NDCG@10 of the dense head's slates, the lowest of equals.

    With a time limit, as many users are measured as time allows.

    Args:
        model: A recommender with a dense head, in eval mode.
        bundle: The bundle with catalogue and events.
        bonus: The history bonus; None for none.
        users: Maximum number of validation users.
        limit: Time limit.

    Returns:
        The fitted weight; None without a user with a negative event, or if the time is over.
    """
    found, catalog = disliked_before(bundle), bundle.catalog()
    order = np.random.default_rng(0).permutation(len(found.cases))[:users]
    sums, measured = np.zeros(len(WEIGHTS)), 0
    for first in range(0, len(order), GROUP):
        if limit.is_over:
            break
        part = np.sort(order[first : first + GROUP])
        sums += sum_gains(model, catalog, bonus, found, part, WEIGHTS)[0]
        measured += len(part)
    if not measured:
        return None
    means = (sums / measured).tolist()
    return NegativeFit(
        WEIGHTS[int(np.argmax(means))], measured, dict(zip(WEIGHTS, means, strict=True))
    )


def sum_gains(
    model: SemanticIdModel,
    catalog: Catalog,
    bonus: HistoryBonus | None,
    found: Disliked,
    which: NDArray[np.int64],
    weights: tuple[float, ...],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the sums of NDCG@10 and of recall@10 over some users, for each weight."""
    codes, cases = catalog.semantic_ids.codes, found.cases
    similarity, version = ItemSimilarity.of(catalog.vectors), first_version(catalog, {})
    size = max(1, min(GROUP, MAX_ENTRIES // len(codes)))
    ndcg, recall = np.zeros(len(weights)), np.zeros(len(weights))
    for first in range(0, len(which), size):
        part = which[first : first + size]
        dense = torch.from_numpy(dense_log_p(model, codes, cases, part))
        if bonus is not None:
            histories = [model_window(cases.history(c), model.template) for c in part.tolist()]
            bonus.add_to(dense, histories)
        hide(dense, cases.histories(part))
        held = torch.from_numpy(cases.held[part])[:, None]
        lowered = [
            similarity.near_items(found.rows[case], found.weights[case], version)
            for case in part.tolist()
        ]
        for place, case in enumerate(part.tolist()):
            own = found.rows[case][found.rows[case] != cases.held[case]]
            dense[place, torch.from_numpy(own)] = -torch.inf
        for number, weight in enumerate(weights):
            scores = dense.clone()
            for place, items in enumerate(lowered):
                scores[place, items.rows] -= torch.from_numpy(np.float32(weight) * items.amounts)
            ranks = (scores > scores.gather(1, held)).sum(1)
            metrics = user_metrics(ranks.numpy(), (K,))
            ndcg[number] += metrics[f"ndcg@{K}"].sum()
            recall[number] += metrics[f"recall@{K}"].sum()
    return ndcg, recall
