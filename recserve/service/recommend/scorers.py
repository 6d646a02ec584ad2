"""Scorers of candidates: the ranker, and the likelihood under the recommender."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from recserve.core.request import LikelihoodQuery, RankQuery, Request
from recserve.schemas.items import Candidate, InvalidRequest
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.history import EPOCH, History
from recserve.service.recommend.roots import RankerPrefixes, RecommenderPrefixes

MICROSECOND = datetime.timedelta(microseconds=1)


@dataclass(frozen=True)
class ScoringQuery:
    """Candidates to score for a user.

    Attributes:
        snapshot: The catalogue version.
        history: The user's history.
        candidates: M candidates of the request.
        rows: [M] int64 item rows; all candidates exist in the catalogue.
        deadline_s: time.monotonic() value of the deadline; None means no deadline.
    """

    snapshot: Snapshot
    history: History
    candidates: Sequence[Candidate]
    rows: np.ndarray
    deadline_s: float | None

    @property
    def dated(self) -> bool:
        """True if a candidate has a `shown_at` time."""
        return any([c.shown_at for c in self.candidates])

    @property
    def described(self) -> bool:
        """True if a candidate has features."""
        return any([c.features for c in self.candidates])


@dataclass(frozen=True)
class ScoringRequest:
    """A request for the engine.

    Attributes:
        request: The request.
        degraded: Fields of the candidates that the scorer ignores, as words of the response.
    """

    request: Request
    degraded: tuple[str, ...] = ()


class ItemScorer(Protocol):
    """Scores candidates with one model.

    Attributes:
        tasks: Names of the columns of the scores.
    """

    tasks: tuple[str, ...]

    def build_request(self, query: ScoringQuery) -> ScoringRequest:
        """Builds the request for the engine."""
        ...

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Converts the engine's values [M, tasks] to the scores of the response."""
        ...


class RankerScorer:
    """Scores candidates with the ranker: one probability per task."""

    def __init__(self, roots: RankerPrefixes, tasks: tuple[str, ...]) -> None:
        self.roots = roots
        self.tasks = tasks

    def build_request(self, query: ScoringQuery) -> ScoringRequest:
        """Builds the request for the engine.

        Raises:
            InvalidRequest: If a candidate has an unknown feature or a value out of range.
        """
        q, dated = query, query.dated
        uses_time = dated and self.roots.settings.has_timestamps
        root, branches, limits = self.roots.root(
            q.snapshot,
            q.history,
            q.rows,
            _moments(q.candidates) if uses_time else None,
            self._given(q.candidates) if q.described else {},
        )
        request = RankQuery(root, branches, limits, q.deadline_s)
        return ScoringRequest(request, ("shown_at_ignored",) if dated and not uses_time else ())

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Converts logits to probabilities."""
        return np.asarray(1 / (1 + np.exp(-values.astype(np.float64))))

    def _given(self, candidates: Sequence[Candidate]) -> dict[str, np.ndarray]:
        """Returns [M] values of each feature in the request; NaN where a candidate lacks it."""
        settings = self.roots.settings
        names = settings.side_names
        given: dict[str, np.ndarray] = {}
        for place, candidate in enumerate(candidates):
            for name, value in (candidate.features or {}).items():
                if name not in names:
                    known = ", ".join(names) or "none"
                    raise InvalidRequest(
                        "candidates.features",
                        f"this ranker has {known}; {candidate.item_id!r} has {name!r}",
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
    """Scores candidates by the log-probability of their semantic id under the recommender."""

    tasks: tuple[str, ...] = ("likelihood",)

    def __init__(self, roots: RecommenderPrefixes) -> None:
        self.roots = roots

    def build_request(self, query: ScoringQuery) -> ScoringRequest:
        """Builds the request for the engine; ignores features and `shown_at`."""
        q = query
        root = self.roots.root(q.snapshot, q.history.rows)
        ignored = {"features_ignored": q.described, "shown_at_ignored": q.dated}
        return ScoringRequest(
            LikelihoodQuery(root, q.snapshot.trie, q.rows, q.deadline_s),
            tuple(word for word, there in ignored.items() if there),
        )

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Returns the log-probabilities unchanged."""
        return values.astype(np.float64)


def _moments(candidates: Sequence[Candidate]) -> np.ndarray:
    """Returns [M] int64 microseconds of each exposure; now for a candidate without `shown_at`."""
    now = datetime.datetime.now(datetime.UTC)
    return np.array([((c.shown_at or now) - EPOCH) // MICROSECOND for c in candidates], np.int64)
