"""Two ways to score candidates: the ranker, and the recommender's likelihood."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from recserve.core.request import LikelihoodQuery, RankQuery, Request
from recserve.schemas.items import Candidate, InvalidRequest
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.history.histories import EPOCH, History
from recserve.service.recommend.roots import RankerRoots, RecommenderRoots

MICROSECOND = datetime.timedelta(microseconds=1)


@dataclass(frozen=True)
class ScoringQuery:
    """What is to be scored for whom. rows: [M] int64 item row of each candidate, none unknown."""

    snapshot: Snapshot
    history: History
    candidates: Sequence[Candidate]
    rows: np.ndarray
    deadline_s: float | None

    @property
    def dated(self) -> bool:
        """Whether a candidate says when it was shown."""
        return any([c.shown_at for c in self.candidates])

    @property
    def described(self) -> bool:
        """Whether a candidate brings features."""
        return any([c.features for c in self.candidates])


@dataclass(frozen=True)
class ScoringRequest:
    """request: for the engine. degraded: what of the candidates could not be heeded."""

    request: Request
    degraded: tuple[str, ...] = ()


class ItemScorer(Protocol):
    """One way to score candidates. tasks: the columns of its scores."""

    tasks: tuple[str, ...]

    def build_request(self, query: ScoringQuery) -> ScoringRequest:
        """What the engine is asked."""
        ...

    def scores(self, values: np.ndarray) -> np.ndarray:
        """[M, tasks] from the engine's values, in the unit of the answer."""
        ...


class RankerScorer:
    """Probabilities per task, from the ranker."""

    def __init__(self, roots: RankerRoots, tasks: tuple[str, ...]) -> None:
        self.roots = roots
        self.tasks = tasks

    def build_request(self, query: ScoringQuery) -> ScoringRequest:
        """Raises InvalidRequest for a feature that the ranker does not have."""
        q, dated = query, query.dated
        heeded = dated and self.roots.settings.has_timestamps
        root, branches, limits = self.roots.root(
            q.snapshot,
            q.history,
            q.rows,
            _moments(q.candidates) if heeded else None,
            self._given(q.candidates) if q.described else {},
        )
        request = RankQuery(root, branches, limits, q.deadline_s)
        return ScoringRequest(request, ("shown_at_ignored",) if dated and not heeded else ())

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Logits to probabilities."""
        return np.asarray(1 / (1 + np.exp(-values.astype(np.float64))))

    def _given(self, candidates: Sequence[Candidate]) -> dict[str, np.ndarray]:
        """[M] of each feature that a candidate came with, NaN where it did not."""
        settings = self.roots.settings
        names = settings.side_names
        given: dict[str, np.ndarray] = {}
        for place, candidate in enumerate(candidates):
            for name, value in (candidate.features or {}).items():
                if name not in names:
                    known = ", ".join(names) or "none"
                    raise InvalidRequest(
                        "candidates.features",
                        f"this ranker has {known}; {candidate.item_id!r} came with {name!r}",
                    )
                low, high = settings.side_range(name)
                if not low <= value <= high:
                    raise InvalidRequest(
                        f"candidates[{place}].features.{name}",
                        f"expected {low:g} to {high:g}, got {value:g}",
                    )
                given.setdefault(name, np.full(len(candidates), np.nan))[place] = value
        return given


class LikelihoodScorer:
    """Log-probability of each candidate's semantic id, from the recommender."""

    tasks: tuple[str, ...] = ("likelihood",)

    def __init__(self, roots: RecommenderRoots) -> None:
        self.roots = roots

    def build_request(self, query: ScoringQuery) -> ScoringRequest:
        """Features and moments of exposure say nothing to this scorer."""
        q = query
        root = self.roots.root(q.snapshot, q.history.rows)
        ignored = {"features_ignored": q.described, "shown_at_ignored": q.dated}
        return ScoringRequest(
            LikelihoodQuery(root, q.snapshot.trie, q.rows, q.deadline_s),
            tuple(word for word, there in ignored.items() if there),
        )

    def scores(self, values: np.ndarray) -> np.ndarray:
        """As they are."""
        return values.astype(np.float64)


def _moments(candidates: Sequence[Candidate]) -> np.ndarray:
    """[M] int64 microseconds of each exposure; now where it is not said."""
    now = datetime.datetime.now(datetime.UTC)
    return np.array([((c.shown_at or now) - EPOCH) // MICROSECOND for c in candidates], np.int64)
