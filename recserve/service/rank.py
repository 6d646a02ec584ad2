"""From a rank body to a ranking, by the ranker or by the recommender's likelihood."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from recserve.core.request import LikelihoodRequest, RankRequest, Request, Result, Scores
from recserve.messages import Candidate, InvalidRequest, RankAnswer, RankBody, RankedItem
from recserve.service.histories import History
from recserve.service.roots import RankerRoots, RecommenderRoots
from recserve.service.runtime import Runtime
from recserve.service.snapshot import Snapshot
from recserve.service.work import Stopwatch, Work

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)


class Scorer(Protocol):
    """One way to score candidates. tasks: the columns of its scores."""

    tasks: tuple[str, ...]

    def request(
        self,
        snapshot: Snapshot,
        history: History,
        candidates: Sequence[Candidate],
        rows: np.ndarray,
        deadline_s: float | None,
    ) -> tuple[Request, list[str]]:
        """What the engine is asked, and what of the candidates could not be heeded."""
        ...

    def scores(self, values: np.ndarray) -> np.ndarray:
        """[M, tasks] from the engine's values, in the unit of the answer."""
        ...


class RankerScorer:
    """Probabilities per task, from the ranker."""

    def __init__(self, roots: RankerRoots, tasks: tuple[str, ...]) -> None:
        self.roots = roots
        self.tasks = tasks

    def request(
        self,
        snapshot: Snapshot,
        history: History,
        candidates: Sequence[Candidate],
        rows: np.ndarray,
        deadline_s: float | None,
    ) -> tuple[Request, list[str]]:
        """Raises InvalidRequest for a feature that the ranker does not have."""
        settings = self.roots.settings
        shown_at, notes = None, []
        if any([c.shown_at for c in candidates]):
            if settings.has_timestamps:
                shown_at = _moments(candidates)
            else:
                notes.append("shown_at_ignored")
        given = self._given(candidates) if any([c.features for c in candidates]) else {}
        root, branches, limits = self.roots.root(snapshot, history, rows, shown_at, given)
        return RankRequest(root, branches, limits, deadline_s), notes

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Logits to probabilities."""
        return np.asarray(1 / (1 + np.exp(-values.astype(np.float64))))

    def _given(self, candidates: Sequence[Candidate]) -> dict[str, np.ndarray]:
        """[M] of each feature that a candidate came with, NaN where it did not."""
        names = self.roots.settings.side_names
        given: dict[str, np.ndarray] = {}
        for place, candidate in enumerate(candidates):
            for name, value in (candidate.features or {}).items():
                if name not in names:
                    known = ", ".join(names) or "none"
                    raise InvalidRequest(
                        "candidates.features",
                        f"this ranker has {known}; {candidate.item_id!r} came with {name!r}",
                    )
                given.setdefault(name, np.full(len(candidates), np.nan))[place] = value
        return given


class LikelihoodScorer:
    """Log-probability of each candidate's semantic id, from the recommender."""

    tasks: tuple[str, ...] = ("likelihood",)

    def __init__(self, roots: RecommenderRoots) -> None:
        self.roots = roots

    def request(
        self,
        snapshot: Snapshot,
        history: History,
        candidates: Sequence[Candidate],
        rows: np.ndarray,
        deadline_s: float | None,
    ) -> tuple[Request, list[str]]:
        """Features and moments of exposure say nothing to this scorer."""
        notes = []
        if any([c.features for c in candidates]):
            notes.append("features_ignored")
        if any([c.shown_at for c in candidates]):
            notes.append("shown_at_ignored")
        root = self.roots.root(snapshot, history.rows)
        return LikelihoodRequest(root, snapshot.trie, rows, deadline_s), notes

    def scores(self, values: np.ndarray) -> np.ndarray:
        """As they are."""
        return values.astype(np.float64)


class Rankings:
    """Rankings by name of scorer; `auto` is the first of them."""

    def __init__(self, runtime: Runtime, scorers: dict[str, Scorer]) -> None:
        self.runtime = runtime
        self.scorers = scorers

    def begin(
        self, body: RankBody, request_id: str | None, deadline_s: float | None
    ) -> Work[RankAnswer]:
        """Look the candidates up and hand them to the engine.

        Raises InvalidRequest, and what Engine.submit raises.
        """
        watch = Stopwatch()
        name = next(iter(self.scorers)) if body.scorer == "auto" else body.scorer
        if name not in self.scorers:
            there = ", ".join(("auto", *self.scorers))
            raise InvalidRequest("scorer", f"this bundle has {there}, got {body.scorer!r}")
        scorer = self.scorers[name]
        sort_by = scorer.tasks[0] if body.sort_by is None else body.sort_by
        if sort_by not in scorer.tasks:
            there = ", ".join(scorer.tasks)
            raise InvalidRequest("sort_by", f"{name} scores {there}, got {sort_by!r}")
        snapshot = self.runtime.snapshot
        history = self.runtime.histories.read(body.user, body.history, snapshot)
        degraded = list(history.degraded)
        if not history.rows.size:
            degraded.append("cold_start")
        candidates = body.candidates
        ids = [c.item_id for c in candidates]
        found = snapshot.rows_of(ids)
        missing: list[str] = []
        if min(found) < 0 or len(set(found)) != len(found):
            missing, kept = _usable(ids, found)
            if len(kept) + len(missing) < len(found):
                degraded.append("duplicate_candidates")
            candidates, found = [candidates[i] for i in kept], [found[i] for i in kept]
            ids = [c.item_id for c in candidates]
        rows = np.array(found, dtype=np.int64)

        def finish(result: Result | None) -> RankAnswer:
            values = np.zeros((0, len(scorer.tasks)))
            if result is not None:
                assert isinstance(result, Scores)
                values = result.values
            scores = scorer.scores(values)
            return RankAnswer(
                items=_ranked(ids, scores, scorer.tasks, sort_by),
                missing_item_ids=missing,
                scorer=name,
                strategy=name,
                exact=True,
                rounds=0 if result is None else 1,
                **self.runtime.envelope(
                    request_id,
                    body.user,
                    snapshot,
                    degraded,
                    watch,
                    None if result is None else result.timing,
                ),
            )

        if not rows.size:
            watch.features_done()
            return Work(None, finish)
        request, notes = scorer.request(snapshot, history, candidates, rows, deadline_s)
        degraded += notes
        watch.features_done()
        return Work(self.runtime.engine.submit(request), finish)


def _usable(ids: Sequence[str], rows: Sequence[int]) -> tuple[list[str], list[int]]:
    """Distinct unknown ids, and the places of the first candidate of each known item."""
    missing: dict[str, None] = {}
    first: dict[int, int] = {}
    for place, row in enumerate(rows):
        if row < 0:
            missing[ids[place]] = None
        else:
            first.setdefault(row, place)
    return list(missing), list(first.values())


def _moments(candidates: Sequence[Candidate]) -> np.ndarray:
    """[M] int64 microseconds of each exposure; now where it is not said."""
    now = datetime.datetime.now(datetime.UTC)
    return np.array([((c.shown_at or now) - EPOCH) // MICROSECOND for c in candidates], np.int64)


def _ranked(
    ids: Sequence[str], scores: np.ndarray, tasks: tuple[str, ...], sort_by: str
) -> list[RankedItem]:
    """Best first; equal scores in the order they came. scores [M, tasks]."""
    column = tasks.index(sort_by)
    order = np.argsort(-scores[:, column], kind="stable")
    ranked = scores[order]
    columns = ranked.T.tolist()
    by_task = [{tasks[0]: value} for value in columns[0]]
    for task, values in zip(tasks[1:], columns[1:], strict=True):
        for scored, value in zip(by_task, values, strict=True):
            scored[task] = value
    return list(
        map(
            RankedItem,
            [ids[place] for place in order.tolist()],
            columns[column],
            range(1, len(ids) + 1),
            by_task,
        )
    )
