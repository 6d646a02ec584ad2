"""Fits the history bonus of a trained recommender: links from training events, sizes by validation.

The model is not changed. First the factor of the links is chosen with seen items filtered, then
what items of the history get, with seen items kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.evaluation.accuracy import user_metrics
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.slates import dense_log_p, model_window
from recserve.evaluation.untrained import MAX_ENTRIES, hide
from recserve.features.tables.events import EventLog
from recserve.models.history_bonus import HistoryBonus
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.training.time_limit import NO_LIMIT, TimeLimit

# How far apart two events may be to link their items. A pair counts 1 / distance.
DISTANCE = 3
RANGE_EVENTS = 1 << 21  # of the items whose links are counted at once
MAX_LINKS = 100
FACTORS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
# In the order in which the first of several equals is taken.
REPEATS = (0.0, -1.0, 1.0, -2.0, 2.0, -4.0, 4.0, -8.0)
K = 10
USERS = 2000
GROUP = 64  # users between two looks at the time limit


@dataclass(frozen=True)
class BonusFit:
    """A fitted bonus with its evidence on validation users.

    Attributes:
        bonus: The bonus; None if none is better than nothing.
        factor: Factor of the links.
        repeat: What items of the history get.
        users: Number of validation users; with a time limit the smaller number of both choices.
        filtered: NDCG@10 of the dense head by factor, with seen items filtered.
        kept: NDCG@10 with that factor by `repeat`, with seen items kept.
    """

    bonus: HistoryBonus | None
    factor: float
    repeat: float
    users: int
    filtered: dict[float, float]
    kept: dict[float, float]

    def evidence(self) -> dict[str, Any]:
        """Returns the sizes, and the figures that they were chosen by, for the manifest."""
        return {
            "factor": self.factor,
            "repeat": self.repeat,
            "users": self.users,
            "filtered": {f"{factor:g}": gain for factor, gain in self.filtered.items()},
            "kept": {f"{repeat:g}": gain for repeat, gain in self.kept.items()},
        }

    def __str__(self) -> str:
        return (
            f"history bonus: links x {self.factor:g}, seen items {self.repeat:+g}; NDCG@{K} of the "
            f"dense head on {self.users} validation users: filtered {self.filtered[0.0]:.4f} to "
            f"{self.filtered[self.factor]:.4f}, kept {self.kept[0.0]:.4f} to "
            f"{self.kept[self.repeat]:.4f}"
        )


def fit_history_bonus(
    model: SemanticIdModel,
    codes: NDArray[np.generic],
    events: EventLog,
    users: int = USERS,
    limit: TimeLimit = NO_LIMIT,
) -> BonusFit | None:
    """Chooses the bonus with the best NDCG@10 of the dense head's slates.

    With a time limit, as many users are measured as time allows. Each choice takes half of it.

    Args:
        model: A recommender with a dense head, in eval mode.
        codes: [I, L] semantic ids of the items.
        events: All events. Links come from those that leave-one-out trains on.
        users: Maximum number of validation users.
        limit: Time limit.

    Returns:
        The fitted bonus; None if the time does not suffice for GROUP users.
    """
    cases = leave_one_out_cases(events, "valid").sample(users)
    plain = link_items(events.leave_one_out().train, len(codes))
    linked = [replace(plain, links=plain.links * np.float32(factor)) for factor in FACTORS]
    gains, measured = _gains(model, codes, cases, linked, True, limit.part(0.5))
    if not measured:
        return None
    best = int(np.argmax(gains))
    repeated = [replace(linked[best], repeat=repeat) for repeat in REPEATS]
    kept, then_measured = _gains(model, codes, cases, repeated, False, limit)
    if not then_measured:
        return None
    chosen = int(np.argmax(kept))
    return BonusFit(
        bonus=repeated[chosen] if best or chosen else None,
        factor=FACTORS[best],
        repeat=REPEATS[chosen],
        users=min(measured, then_measured),
        filtered=dict(zip(FACTORS, gains, strict=True)),
        kept=dict(zip(REPEATS, kept, strict=True)),
    )


def link_items(train: EventLog, num_items: int) -> HistoryBonus:
    """Returns the links of training events, without repeats.

    link(a, i) = log(1 + sum over users, and over pairs of a and a later i, of weight / distance)

    The distance is that of the events in the user's history, at most DISTANCE. The weight is that
    of the later event. An item keeps its MAX_LINKS strongest links.

    Args:
        train: Training events.
        num_items: I, the number of items.
    """
    ranges = train.item_ranges(num_items, RANGE_EVENTS)
    parts = [_strongest_links(train, num_items, first, last) for first, last in ranges]
    counts, rows, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    return HistoryBonus(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        rows.astype(np.int32),
        np.log1p(values).astype(np.float32),
        0.0,
    )


def _strongest_links(
    train: EventLog, num_items: int, first: int, last: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns the links of the items `first` to `last`: how many, to which items, and sums."""
    rows = train.item_rows
    keys, shares = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for distance in range(1, DISTANCE + 1):
        for events in train.pairs(distance):
            left = rows[events]
            own = (left >= first) & (left < last)
            later, left = events[own] + distance, left[own].astype(np.int64)
            share = np.full(len(left), 1 / distance)
            if train.weights is not None:
                share *= train.weights[later]
            counted = share > 0
            keys.append((left * num_items + rows[later])[counted])
            shares.append(share[counted])
    pairs, which = np.unique(np.concatenate(keys), return_inverse=True)
    sums = np.bincount(which.reshape(-1), np.concatenate(shares), len(pairs))
    item, row = np.divmod(pairs, num_items)
    order = np.lexsort((row, -sums, item))  # strongest first, and equals by row
    item, row, value = item[order], row[order], sums[order]
    strong = np.arange(len(item)) - np.searchsorted(item, item) < MAX_LINKS
    counts = np.bincount(item[strong] - first, minlength=last - first)
    return counts, row[strong], value[strong]


def _gains(
    model: SemanticIdModel,
    codes: NDArray[np.generic],
    cases: Cases,
    bonuses: Sequence[HistoryBonus],
    filtered: bool,
    limit: TimeLimit,
) -> tuple[list[float], int]:
    """Returns the mean NDCG@10 of the dense head with each bonus, and the number of users."""
    sums, measured = np.zeros(len(bonuses)), 0
    for group in cases.groups(GROUP) if limit.exists else (cases,):
        if limit.is_over:
            break
        sums += _sum_gains(model, codes, group, bonuses, filtered)
        measured += len(group)
    means: list[float] = (sums / max(measured, 1)).tolist()
    return means, measured


def _sum_gains(
    model: SemanticIdModel,
    codes: NDArray[np.generic],
    cases: Cases,
    bonuses: Sequence[HistoryBonus],
    filtered: bool,
) -> NDArray[np.float64]:
    """Returns the sum of NDCG@10 over the users of the dense head with each bonus."""
    size = max(1, min(256, MAX_ENTRIES // len(codes)))
    sums = np.zeros(len(bonuses))
    for which in cases.batches(size):
        dense = torch.from_numpy(dense_log_p(model, codes, cases, which))
        histories = [model_window(cases.history(case), model.template) for case in which.tolist()]
        held = torch.from_numpy(cases.held[which])[:, None]
        for number, bonus in enumerate(bonuses):
            scores = dense.clone()
            bonus.add_to(scores, histories)
            if filtered:
                hide(scores, cases.histories(which))
            ranks = (scores > scores.gather(1, held)).sum(1)
            sums[number] += user_metrics(ranks.numpy(), (K,))[f"ndcg@{K}"].sum()
    return sums
