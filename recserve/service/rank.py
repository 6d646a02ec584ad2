"""Answers rank requests: with the ranker, or by likelihood under the recommender."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from recserve.core.client import LOCAL, Client
from recserve.core.request import LikelihoodQuery, RankQuery, Request, Scores
from recserve.engine.engine import Engine
from recserve.schemas.items import (
    Candidate,
    InvalidRequest,
    RankBatchRequest,
    RankedItem,
    RankRequest,
    RankResponse,
    not_offered_error,
)
from recserve.service.attribution import ITEM_ID, Envelope
from recserve.service.fields import check_fields
from recserve.service.histories import Histories
from recserve.service.history import EPOCH, MICROSECOND, History
from recserve.service.live_catalog import LiveCatalog
from recserve.service.pending import (
    ItemCall,
    ItemService,
    Pending,
    Prepared,
    earlier_deadline,
    id_of_part,
    submit_prepared,
)
from recserve.service.prefixes import RankerPrefixBuilder, RecommenderPrefixBuilder
from recserve.service.snapshot import Snapshot

# The scorers, with advice for bundles that lack one.
SCORERS = {
    "ranker": "no ranker was trained; run `recserve train ranker`",
    "likelihood": "no recommender was trained; run `recserve train recommender`",
}


class RankService(ItemService[RankRequest, RankResponse]):
    """Ranks candidates with one of the bundle's scorers.

    Attributes:
        scorers: Scorers by name; `auto` selects the first one.
    """

    def __init__(
        self,
        engine: Engine,
        catalog: LiveCatalog,
        histories: Histories,
        envelope: Envelope,
        scorers: dict[str, ItemScorer],
    ) -> None:
        """Connects the parts that a rank request needs.

        Args:
            engine, catalog, histories: As in `ItemService`.
            envelope: Makes the fields that all answers share.
            scorers: Scorers by name; `auto` selects the first one.
        """
        super().__init__(engine, catalog, histories)
        self.scorers = scorers
        self._envelope = envelope

    def begin_each(
        self,
        body: RankBatchRequest,
        request_id: str | None = None,
        deadline_s: float | None = None,
        client: Client = LOCAL,
    ) -> list[Pending[RankResponse]]:
        """Starts the rankings of a batch, in order.

        A ranking with a `timeout_ms` of its own ends at this or at the deadline of the batch.

        Returns:
            One pending answer per ranking. An invalid request yields its error as the answer.

        Raises:
            InvalidRequest: If the rankings together ask for too many values of fields.
            QueueFull: If the queue cannot hold the whole batch now; none of it is started.
            TooManyQueries: If the queue can never hold the whole batch.
        """
        self.check_together(body.requests)
        answers: list[Prepared[RankResponse] | Exception] = []
        for index, one in enumerate(body.requests):
            name = one.request_id or (id_of_part(request_id, index) if request_id else None)
            try:
                own_s = earlier_deadline(one.timeout_ms, deadline_s)
                prepared = self._prepare(one, name, own_s)
                for query in prepared.queries:
                    self._engine.check(query)
                answers.append(prepared)
            except ValueError as error:
                answers.append(error)
        return submit_prepared(self._engine, answers, client)

    def _num_items(self, body: RankRequest) -> int:
        return len(body.candidates)

    def _translate(self, call: ItemCall[RankRequest]) -> Prepared[RankResponse]:
        body, snapshot = call.body, call.snapshot
        name = self._scorer_name(body)
        scorer = self.scorers[name]
        sort_by = _sorting_task(scorer, name, body)
        if body.fields:
            check_fields(body.fields, snapshot.items)
        history = self._histories.read(body.user, body.history, snapshot)
        degraded = [*call.degraded, *history.degraded]
        if not history.rows.size:
            degraded.append("cold_start")
        candidates, rows, missing = _find_items(snapshot, body.candidates)
        if len(candidates) + len(missing) < len(body.candidates):
            degraded.append("duplicate_candidates")
        queries: list[Request] = []
        if candidates:
            query, ignored = scorer.build_query(
                snapshot,
                None if body.user is None else body.user.id,
                history,
                candidates,
                rows,
                call.deadline_s,
            )
            queries.append(query)
            degraded += ignored
        ids = [c.item_id for c in candidates]
        call.watch.features_done()

        def finish(results: list[Scores]) -> RankResponse:
            values, timing = np.zeros((0, len(scorer.tasks))), None
            if results:
                values, timing = results[0].values, results[0].timing
            fields = snapshot.items.fields(rows, body.fields) if body.fields else []
            items = _sort_items(ids, fields, scorer.scores(values), scorer.tasks, sort_by)
            return RankResponse(
                items=items,
                missing_item_ids=missing,
                scorer=name,
                strategy=name,
                exact=True,
                rounds=len(results),
                **self._envelope.fields(call, degraded, timing, map(ITEM_ID, items)),
            )

        return Prepared(queries, finish)

    def _scorer_name(self, body: RankRequest) -> str:
        name = next(iter(self.scorers)) if body.scorer == "auto" else body.scorer
        if name not in self.scorers:
            raise not_offered_error("scorer", name, ("auto", *self.scorers), SCORERS)
        return name


class ItemScorer(Protocol):
    """Scores candidates with one model.

    Attributes:
        tasks: Names of the columns of the scores.
    """

    tasks: tuple[str, ...]

    def build_query(
        self,
        snapshot: Snapshot,
        user: str | None,
        history: History,
        candidates: Sequence[Candidate],
        rows: np.ndarray,
        deadline_s: float | None,
    ) -> tuple[Request, list[str]]:
        """Builds the engine's query for M candidates.

        Args:
            snapshot: The catalogue version.
            user: Id of the user. None if the request names none.
            history: The user's history.
            candidates: M candidates of the request.
            rows: [M] int64 item rows; all candidates exist in the catalogue.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.

        Returns:
            The query, and words for the fields of the candidates that the scorer ignores.
        """
        ...

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Converts the engine's values [M, tasks] to the scores of the response."""
        ...


class RankerScorer:
    """Scores candidates with the ranker: one probability per task."""

    def __init__(self, prefixes: RankerPrefixBuilder, tasks: tuple[str, ...]) -> None:
        self.prefixes = prefixes
        self.tasks = tasks

    def build_query(
        self,
        snapshot: Snapshot,
        user: str | None,
        history: History,
        candidates: Sequence[Candidate],
        rows: np.ndarray,
        deadline_s: float | None,
    ) -> tuple[Request, list[str]]:
        """Builds the engine's query; see `ItemScorer`.

        Raises:
            InvalidRequest: If a candidate has an unknown feature or a value out of range.
        """
        dated = _have_times(candidates)
        uses_time = dated and self.prefixes.settings.has_timestamps
        prefix, branches, limits = self.prefixes.build(
            snapshot,
            history,
            rows,
            _moments(candidates) if uses_time else None,
            self._given_features(candidates) if _have_features(candidates) else {},
        )
        ignored = ["shown_at_ignored"] if dated and not uses_time else []
        return RankQuery(prefix, branches, limits, deadline_s), ignored

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Converts logits to probabilities."""
        return np.asarray(1 / (1 + np.exp(-values.astype(np.float64))))

    def _given_features(self, candidates: Sequence[Candidate]) -> dict[str, np.ndarray]:
        """Returns [M] values of each feature in the request; NaN where a candidate lacks it."""
        settings = self.prefixes.settings
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

    def __init__(self, prefixes: RecommenderPrefixBuilder) -> None:
        self.prefixes = prefixes

    def build_query(
        self,
        snapshot: Snapshot,
        user: str | None,
        history: History,
        candidates: Sequence[Candidate],
        rows: np.ndarray,
        deadline_s: float | None,
    ) -> tuple[Request, list[str]]:
        """Builds the engine's query; ignores features and `shown_at`."""
        prefix = self.prefixes.build(snapshot, history.rows, user)
        ignored = ["features_ignored"] if _have_features(candidates) else []
        if _have_times(candidates):
            ignored.append("shown_at_ignored")
        return LikelihoodQuery(prefix, snapshot.trie, rows, deadline_s), ignored

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Returns the log-probabilities unchanged."""
        return values.astype(np.float64)


def _have_times(candidates: Sequence[Candidate]) -> bool:
    return any([c.shown_at for c in candidates])


def _have_features(candidates: Sequence[Candidate]) -> bool:
    return any([c.features for c in candidates])


def _moments(candidates: Sequence[Candidate]) -> np.ndarray:
    """Returns [M] int64 microseconds of each exposure; now for a candidate without `shown_at`."""
    now = datetime.datetime.now(datetime.UTC)
    return np.array([((c.shown_at or now) - EPOCH) // MICROSECOND for c in candidates], np.int64)


def _sorting_task(scorer: ItemScorer, name: str, body: RankRequest) -> str:
    task = scorer.tasks[0] if body.sort_by is None else body.sort_by
    if task not in scorer.tasks:
        there = ", ".join(scorer.tasks)
        raise InvalidRequest("sort_by", f"expected a task of {name}: {there}, got {task!r}")
    return task


def _find_items(
    snapshot: Snapshot, candidates: Sequence[Candidate]
) -> tuple[Sequence[Candidate], np.ndarray, list[str]]:
    """Looks up the candidates; the first of several entries of an item counts.

    Returns:
        M distinct candidates that the catalogue has, their rows [M] int64, and the distinct ids
        that it does not have.
    """
    rows = snapshot.rows_of([c.item_id for c in candidates])
    if min(rows) >= 0 and len(set(rows)) == len(rows):
        return candidates, np.array(rows, dtype=np.int64), []
    missing: dict[str, None] = {}
    first: dict[int, Candidate] = {}
    for candidate, row in zip(candidates, rows, strict=True):
        if row < 0:
            missing[candidate.item_id] = None
        else:
            first.setdefault(row, candidate)
    return list(first.values()), np.array(list(first), dtype=np.int64), list(missing)


def _sort_items(
    ids: Sequence[str],
    fields: Sequence[dict[str, Any]],
    scores: np.ndarray,
    tasks: tuple[str, ...],
    sort_by: str,
) -> list[RankedItem]:
    """Sorts by score, best first; ties stay in request order.

    Args:
        ids: M item ids.
        fields: Columns to show of each item; empty if none were requested.
        scores: [M, tasks] scores.
        tasks: Names of the columns of the scores.
        sort_by: The task that sorts.
    """
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
            *([[fields[place] for place in order.tolist()]] if fields else []),
        )
    )
