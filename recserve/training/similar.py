"""Makes the links of similar items, and chooses their weight by validation.

The question is that of an item's page: which item comes next in the same session? So a case is the
last item of a history, and the user's next event, at most SESSION_S later. Where no event is that
close or has a time, all users count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recserve.bundle.bundle import SIMILAR_ITEMS, Bundle
from recserve.evaluation.accuracy import ranks_of, user_metrics
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.evaluation import similar_slates
from recserve.features.catalog.catalog import Catalog
from recserve.features.tables.events import EventLog
from recserve.service.similar import BOTH, ItemSimilarity
from recserve.training.recommender.fit_history_bonus import link_items

SESSION_S = 1800
USERS = 2000
K = 10
# In the order in which the first of several equals is taken.
WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class SimilarFit:
    """The chosen weight, with its evidence on validation users.

    Attributes:
        weight: Weight of the links.
        users: Number of validation users.
        in_session: Whether their held-out events follow within SESSION_S.
        ndcg: NDCG@10 of the next item by weight.
    """

    weight: float
    users: int
    in_session: bool
    ndcg: dict[float, float]

    def evidence(self) -> dict[str, Any]:
        """Returns the section of the manifest."""
        figures = {f"{weight:g}": figure for weight, figure in self.ndcg.items()}
        return {
            "weight": self.weight,
            "users": self.users,
            "in_session": self.in_session,
            "ndcg": figures,
        }

    def __str__(self) -> str:
        of = "of the same session" if self.in_session else "of the user"
        return (
            f"similar items: links x {self.weight:g}; NDCG@{K} of the next item {of} on "
            f"{self.users} validation users: vectors alone {self.ndcg[0.0]:.4f}, both "
            f"{self.ndcg[self.weight]:.4f}"
        )


def train_similar(bundle: Bundle) -> SimilarFit:
    """Writes the links of similar items and their weight into a bundle.

    Raises:
        ValueError: If no user has three events.
    """
    events, catalog = bundle.events(), bundle.catalog()
    links = link_items(events.leave_one_out().train, len(catalog))
    cases, in_session = session_cases(events)
    fits = {
        weight: _ndcg(catalog, ItemSimilarity.of(catalog.vectors, links, weight), cases)
        for weight in WEIGHTS
    }
    best = max(WEIGHTS, key=lambda weight: fits[weight])
    fit = SimilarFit(best, len(cases), in_session, fits)
    folder = bundle.directory(SIMILAR_ITEMS)
    folder.mkdir(exist_ok=True)
    links.save(folder)
    bundle.commit(SIMILAR_ITEMS, fit.evidence())
    return fit


def session_cases(events: EventLog) -> tuple[Cases, bool]:
    """Returns validation cases within a session, or all; and which of both they are."""
    cases = leave_one_out_cases(events, "valid")
    near: NDArray[np.int64] = np.zeros(0, np.int64)
    if events.has_timestamps:
        gaps = events.times[cases.stops] - events.times[cases.stops - 1]
        near = np.flatnonzero(gaps <= SESSION_S * 10**6)
    return (cases.take(near) if near.size else cases).sample(USERS), bool(near.size)


def _ndcg(catalog: Catalog, similarity: ItemSimilarity, cases: Cases) -> float:
    slates = similar_slates(catalog, similarity, BOTH, cases, K)
    ranks = ranks_of(slates(np.arange(len(cases)), True), cases.held)
    return float(user_metrics(ranks, (K,))[f"ndcg@{K}"].mean())
