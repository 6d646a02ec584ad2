"""Answers recommend requests."""

from __future__ import annotations

import numpy as np
from msgspec import UNSET, UnsetType

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap, first_k, still_open
from recserve.core.request import Result, Slate, SlateQuery
from recserve.features.catalog.filters import FilterError
from recserve.schemas.explanation import Explanation
from recserve.schemas.items import (
    Exclude,
    InvalidRequest,
    RecommendedItem,
    RecommendRequest,
    RecommendResponse,
)
from recserve.search.strategy import strategy_classes
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.history import History
from recserve.service.pending import Pending, Prepared, Stopwatch
from recserve.service.recommend.auto_strategy import AUTO, BEAM, SPECULATIVE, Choice, Chooser
from recserve.service.recommend.diversity import caps_of
from recserve.service.recommend.explanation import explanation
from recserve.service.recommend.roots import RecommenderPrefixes
from recserve.service.runtime import Runtime

DEFAULT_BEAM_WIDTH = 50
POPULAR = "popular"


class Recommendations:
    """Recommends items with the recommender, or popular items for an empty history.

    Attributes:
        runtime: Engine, catalogue and histories.
        roots: Builds the prefix from a history.
        dense_weight: Default weight of the dense head.
        outcomes: Names of the outcomes that the retriever was trained on.
        chooser: Resolves the strategy `auto`.
    """

    def __init__(
        self,
        runtime: Runtime,
        roots: RecommenderPrefixes,
        dense_weight: float,
        outcomes: tuple[str, ...],
    ) -> None:
        """Stores the objects that all recommend requests share.

        Args:
            runtime: Engine, catalogue and histories.
            roots: Builds the prefix from a history.
            dense_weight: Weight of the dense head for requests that do not set one.
            outcomes: Names of the outcomes that the retriever was trained on.
        """
        self.runtime = runtime
        self.roots = roots
        self.dense_weight = dense_weight
        self.outcomes = outcomes
        self.chooser = Chooser(runtime.engine.strategies)

    def begin(
        self, body: RecommendRequest, request_id: str | None, deadline_s: float | None
    ) -> Pending[RecommendResponse]:
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
        self, body: RecommendRequest, request_id: str | None, deadline_s: float | None
    ) -> Prepared[RecommendResponse]:
        """Reads the history and makes the engine's query. Arguments as in `begin`.

        Raises:
            InvalidRequest: If the body does not match the catalogue or the models.
        """
        watch = Stopwatch()
        snapshot = self.runtime.snapshot
        width = max(DEFAULT_BEAM_WIDTH, body.k) if body.beam_width is None else body.beam_width
        if width < body.k:
            raise InvalidRequest("beam_width", f"at least k = {body.k}, got {width}")
        choice = self._choice(body, width, deadline_s)
        strategy = choice.strategy
        outcome = self._outcome(body.outcome, strategy)
        dense_weight = self._dense_weight(body.dense_weight, strategy)
        allowed, hints = _allowed(snapshot, body), _filter_hints(snapshot, body)
        history = self.runtime.histories.read(body.user, body.history, snapshot)
        degraded = list(history.degraded)
        if choice.hurried:
            degraded.append("hurried")
        if hints is not UNSET:
            degraded.append("unknown_filter_values")
        given = np.array(snapshot.rows_of(body.exclude.item_ids), dtype=np.int64)
        if (given < 0).any():
            degraded.append("unknown_excluded_items")
            given = given[given >= 0]
        seen = _seen(body.exclude, history)
        if body.exclude.seen_within_s is not None and not history.dated.all():
            degraded.append("seen_within_s_ignored")
        caps = caps_of(body.diversity, snapshot.items, snapshot.trie, snapshot.categories)
        excluded = np.concatenate([given, seen])
        draft = _SlateBuilder(body, request_id, snapshot, history, excluded, allowed, caps, hints)
        if not history.rows.size:
            degraded.append("cold_start")
            watch.features_done()
            return Prepared(None, lambda _: self._finish(draft, degraded, watch, None))
        request = SlateQuery(
            self.roots.root(snapshot, history.rows),
            snapshot.trie,
            body.k,
            width,
            strategy,
            excluded,
            allowed,
            dense_weight,
            deadline_s,
            snapshot.graph,
            snapshot.index,
            outcome,
            caps,
            body.explain,
        )
        watch.features_done()

        def finish(result: Result | None) -> RecommendResponse:
            assert isinstance(result, Slate)
            self.chooser.took(strategy, width, result.timing.total_ms / 1e3)
            made = strategy
            if body.strategy == AUTO and strategy == SPECULATIVE and not result.timing.drafted:
                made = BEAM
            return self._finish(draft, degraded, watch, result, made)

        return Prepared(request, finish)

    def _choice(self, body: RecommendRequest, width: int, deadline_s: float | None) -> Choice:
        """Resolves the strategy of the request. Raises InvalidRequest for an unknown one."""
        there = self.runtime.engine.strategies
        name = body.strategy
        if name == AUTO:
            if body.outcome is not None and self.outcomes:
                return Choice(_reads_outcome())
            return self.chooser.choose(width, deadline_s)
        if name not in there:
            listed = ", ".join((AUTO, *there))
            raise InvalidRequest("strategy", f"expected one of {listed}, got {body.strategy!r}")
        return Choice(name)

    def _outcome(self, weights: dict[str, float] | None, strategy: str) -> np.ndarray | None:
        """Returns weights [O] in the retriever's order; None means the retriever's own mix."""
        if weights is None:
            return None
        if not strategy_classes()[strategy].outcome:
            reads = _reads_outcome()
            raise InvalidRequest("outcome", f"only strategy {reads!r} uses it, got {strategy!r}")
        unknown = sorted(set(weights) - set(self.outcomes))
        if unknown:
            known = ", ".join(self.outcomes)
            raise InvalidRequest("outcome", f"expected names from {known}, got {unknown[0]!r}")
        return np.array([weights.get(name, 0.0) for name in self.outcomes])

    def _dense_weight(self, weight: float | None, strategy: str) -> float:
        if weight and strategy_classes()[strategy].dense_weight == "refused":
            raise InvalidRequest(
                "dense_weight", f"strategy {strategy!r} does not use it; expected 0, got {weight}"
            )
        if weight and not self.roots.config.dense_head:
            raise InvalidRequest(
                "dense_weight", f"this recommender has no dense head; expected 0, got {weight}"
            )
        return self.dense_weight if weight is None else weight

    def _finish(
        self,
        draft: _SlateBuilder,
        degraded: list[str],
        watch: Stopwatch,
        slate: Slate | None,
        strategy: str = POPULAR,
    ) -> RecommendResponse:
        rows, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        if slate is not None:
            legal = draft.legal(slate.rows)
            if not legal.all():
                self.runtime.illegal(int((~legal).sum()))
                degraded = [*degraded, "illegal_items"]
            rows, scores = slate.rows[legal], slate.scores[legal]
        timing = None if slate is None else slate.timing
        missing = draft.body.k - rows.size
        filled = draft.fill(missing, rows) if missing > 0 else rows[:0]
        if missing > filled.size:
            degraded = [*degraded, "fewer_than_k"]
        if slate is not None and filled.size and not rows.size:
            degraded = [*degraded, "no_model_items"]
        return RecommendResponse(
            items=draft.items(rows, scores, filled),
            strategy=strategy,
            # An exact search returns fewer than k items only if no other item is allowed. Then no
            # popular item can fill the slate either.
            exact=slate is not None and slate.exact and not filled.size,
            rounds=0 if slate is None else slate.rounds,
            filter_hints=draft.filter_hints,
            explanation=self._explanation(draft, slate, rows),
            **self.runtime.envelope(
                draft.request_id, draft.body.user, draft.snapshot, degraded, watch, timing
            ),
        )

    def _explanation(
        self, draft: _SlateBuilder, slate: Slate | None, rows: np.ndarray
    ) -> Explanation | UnsetType:
        if not draft.body.explain:
            return UNSET
        used = 0 if slate is None else self.roots.used(int(draft.history.rows.size))
        return explanation(draft.snapshot.trie, slate, rows, draft.history.num_events, used)


class _SlateBuilder:
    """Checks, fills and formats the slate of one request.

    Attributes:
        body: The request.
        request_id: Identifies the request; None draws a random id.
        snapshot: The catalogue version of the answer.
        history: The user's history.
        excluded: [n] int64 rows that must not be in the slate.
        allowed: Items that satisfy the filter; None without a filter.
        caps: Limits on the number of items per group.
        filter_hints: Texts about values of the filter that no item has; UNSET without any.
    """

    def __init__(
        self,
        body: RecommendRequest,
        request_id: str | None,
        snapshot: Snapshot,
        history: History,
        excluded: np.ndarray,
        allowed: AllowedItems | None,
        caps: tuple[Cap, ...],
        filter_hints: list[str] | UnsetType,
    ) -> None:
        self.body = body
        self.request_id = request_id
        self.snapshot = snapshot
        self.history = history
        self.excluded = excluded
        self.allowed = allowed
        self.caps = caps
        self.filter_hints = filter_hints

    def legal(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] bool: True for existing rows that are not excluded and satisfy the filter."""
        legal = self.snapshot.answerable(rows) & ~np.isin(rows, self.excluded)
        if self.allowed is not None:
            legal &= self.allowed.at(rows)
        return np.asarray(legal)

    def fill(self, count: int, rows: np.ndarray) -> np.ndarray:
        """Returns popular rows for the positions that the model left empty.

        Args:
            count: Number of empty positions.
            rows: [n] rows that are already in the slate; they count towards the caps.

        Returns:
            Up to `count` rows; fewer if the filter or the caps allow no more.
        """
        slate, wanted, allowed = rows, rows.size + count, self.allowed
        while True:
            num_missing, taken = wanted - slate.size, np.concatenate([self.excluded, slate])
            popular = self.snapshot.most_popular(num_missing, taken, allowed)
            both = np.concatenate([slate, popular])
            slate = both[first_k(both, self.caps, wanted)]
            if slate.size == wanted or popular.size < num_missing:
                return np.asarray(slate[rows.size :])
            left = still_open(slate, self.caps, allowed, self.snapshot.num_items)
            allowed = AllowedItems.of(left)

    def items(
        self, rows: np.ndarray, scores: np.ndarray, filled: np.ndarray
    ) -> list[RecommendedItem]:
        """Formats the items of the slate.

        Args:
            rows: [n] rows from the model, best first.
            scores: [n] their scores.
            filled: [m] popular rows that follow them, without scores.
        """
        item_id = self.snapshot.items.item_id
        answers: list[float | None] = [*scores.tolist(), *[None] * filled.size]
        return [
            RecommendedItem(
                item_id=item_id(row),
                score=score,
                rank=rank,
                source=POPULAR if score is None else "model",
                semantic_id=self._codes(row),
            )
            for rank, (row, score) in enumerate(
                zip([*rows.tolist(), *filled.tolist()], answers, strict=True), start=1
            )
        ]

    def _codes(self, row: int) -> list[int] | UnsetType:
        if not self.body.explain:
            return UNSET
        codes: list[int] = self.snapshot.items.codes[row].tolist()
        return codes


def _reads_outcome() -> str:
    """Returns the name of the strategy that reads outcome weights."""
    return next(name for name, each in strategy_classes().items() if each.outcome)


def _seen(exclude: Exclude, history: History) -> np.ndarray:
    """Returns the rows of the history to exclude. Raises InvalidRequest."""
    if exclude.seen_within_s is not None and not exclude.seen:
        raise InvalidRequest("exclude.seen_within_s", "expected seen = true with it, got false")
    if exclude.seen_within_s is not None:
        return history.rows_within(exclude.seen_within_s)
    return history.rows if exclude.seen else history.rows[:0]


def _allowed(snapshot: Snapshot, body: RecommendRequest) -> AllowedItems | None:
    if body.filter is None:
        return None
    try:
        return snapshot.allowed(body.filter)
    except FilterError as error:
        place = f"filter.{error.param}" if error.param else "filter"
        raise InvalidRequest(place, str(error)) from None


def _filter_hints(snapshot: Snapshot, body: RecommendRequest) -> list[str] | UnsetType:
    """Returns a text for each value of a valid filter that no item has; UNSET without any."""
    if body.filter is None:
        return UNSET
    return [str(absent) for absent in snapshot.absent_values(body.filter)] or UNSET
