"""Answers rank requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recserve.core.request import Result, Scores
from recserve.schemas.items import Candidate, InvalidRequest, RankedItem, RankRequest, RankResponse
from recserve.service.pending import Pending, Prepared, Stopwatch
from recserve.service.recommend.scorers import ItemScorer, ScoringQuery
from recserve.service.runtime import Runtime
from recserve.service.snapshot import Snapshot


@dataclass(frozen=True)
class KnownCandidates:
    """The candidates of a request that exist in the catalogue, each item once.

    Attributes:
        candidates: M distinct candidates.
        rows: [M] int64 item rows.
        missing: Distinct ids that the catalogue does not have.
        repeated: True if the request listed an item more than once.
    """

    candidates: Sequence[Candidate]
    rows: np.ndarray
    missing: list[str]
    repeated: bool


class Rankings:
    """Ranks candidates with one of the bundle's scorers.

    Attributes:
        runtime: Engine, catalogue and histories.
        scorers: Scorers by name; `auto` selects the first one.
    """

    def __init__(self, runtime: Runtime, scorers: dict[str, ItemScorer]) -> None:
        self.runtime = runtime
        self.scorers = scorers

    def begin(
        self, body: RankRequest, request_id: str | None, deadline_s: float | None
    ) -> Pending[RankResponse]:
        """Prepares a request and submits it to the engine.

        Args:
            body: The request.
            request_id: Identifies the request; None draws a random id.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.

        Raises:
            InvalidRequest: If the body does not match the catalogue or the models.
            QueueFull: If the queue of the engine is full.
        """
        return self.prepare(body, request_id, deadline_s).begin(self.runtime.engine)

    def prepare(
        self, body: RankRequest, request_id: str | None, deadline_s: float | None
    ) -> Prepared[RankResponse]:
        """Looks up the candidates and makes the engine's query. Arguments as in `begin`.

        Raises:
            InvalidRequest: If the body does not match the catalogue or the models.
        """
        watch = Stopwatch()
        name = self._name(body)
        scorer = self.scorers[name]
        sort_by = _sorting_task(scorer, name, body)
        snapshot = self.runtime.snapshot
        history = self.runtime.histories.read(body.user, body.history, snapshot)
        degraded = list(history.degraded)
        if not history.rows.size:
            degraded.append("cold_start")
        known = _known(snapshot, body.candidates)
        if known.repeated:
            degraded.append("duplicate_candidates")
        ids = [c.item_id for c in known.candidates]

        def finish(result: Result | None) -> RankResponse:
            values = np.zeros((0, len(scorer.tasks)))
            if result is not None:
                assert isinstance(result, Scores)
                values = result.values
            return RankResponse(
                items=_ranked(ids, scorer.scores(values), scorer.tasks, sort_by),
                missing_item_ids=known.missing,
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

        if not ids:
            watch.features_done()
            return Prepared(None, finish)
        scoring = scorer.build_request(
            ScoringQuery(snapshot, history, known.candidates, known.rows, deadline_s)
        )
        degraded += scoring.degraded
        watch.features_done()
        return Prepared(scoring.request, finish)

    def _name(self, body: RankRequest) -> str:
        name = next(iter(self.scorers)) if body.scorer == "auto" else body.scorer
        if name not in self.scorers:
            there = ", ".join(("auto", *self.scorers))
            raise InvalidRequest("scorer", f"expected one of {there}, got {body.scorer!r}")
        return name


def _sorting_task(scorer: ItemScorer, name: str, body: RankRequest) -> str:
    task = scorer.tasks[0] if body.sort_by is None else body.sort_by
    if task not in scorer.tasks:
        there = ", ".join(scorer.tasks)
        raise InvalidRequest("sort_by", f"expected a task of {name}: {there}, got {task!r}")
    return task


def _known(snapshot: Snapshot, candidates: Sequence[Candidate]) -> KnownCandidates:
    """Looks up the candidates; the first of several entries of an item counts."""
    rows = snapshot.rows_of([c.item_id for c in candidates])
    if min(rows) >= 0 and len(set(rows)) == len(rows):
        return KnownCandidates(candidates, np.array(rows, dtype=np.int64), [], False)
    missing: dict[str, None] = {}
    first: dict[int, Candidate] = {}
    for candidate, row in zip(candidates, rows, strict=True):
        if row < 0:
            missing[candidate.item_id] = None
        else:
            first.setdefault(row, candidate)
    return KnownCandidates(
        list(first.values()),
        np.array(list(first), dtype=np.int64),
        list(missing),
        len(missing) + len(first) < len(rows),
    )


def _ranked(
    ids: Sequence[str], scores: np.ndarray, tasks: tuple[str, ...], sort_by: str
) -> list[RankedItem]:
    """Sorts by score, best first; ties stay in request order. scores: [M, tasks]."""
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
