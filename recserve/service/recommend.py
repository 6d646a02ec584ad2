"""Answers recommend requests: a history becomes one query, and its result becomes a slate."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import first_k, still_open
from recserve.core.request import Slate, SlateQuery
from recserve.engine.engine import Engine
from recserve.features.catalog.filters import FilterError
from recserve.schemas.explanation import Explanation
from recserve.schemas.items import (
    InvalidRequest,
    RecommendedItem,
    RecommendRequest,
    RecommendResponse,
)
from recserve.search.strategy import strategy_classes
from recserve.service.attribution import Envelope
from recserve.service.auto_strategy import (
    AUTO,
    BEAM,
    SPECULATIVE,
    AutoSetting,
    StrategyChooser,
)
from recserve.service.explanation import explanation
from recserve.service.fields import check_fields, check_num_values
from recserve.service.histories import Histories
from recserve.service.history import History
from recserve.service.live_catalog import LiveCatalog
from recserve.service.pending import Pending, Prepared, Stopwatch, begin_all
from recserve.service.prefixes import RecommenderPrefixBuilder
from recserve.service.snapshot import Snapshot

log = logging.getLogger(__name__)
DEFAULT_BEAM_WIDTH = 50
POPULAR = "popular"


class RecommendService:
    """Recommends items with the recommender, or popular items for an empty history.

    Attributes:
        prefixes: Builds the prefix from a history.
        dense_weight: Weight of the dense head for requests that do not set one.
        outcomes: Names of the outcomes that the retriever was trained on.
        auto: What validation chose for `auto`, by column; empty without a calibration.
        chooser: Resolves the strategy `auto`.
        illegal_items: Number of excluded or missing items that the model has returned; must stay 0.
    """

    def __init__(
        self,
        engine: Engine,
        catalog: LiveCatalog,
        histories: Histories,
        envelope: Envelope,
        prefixes: RecommenderPrefixBuilder,
        dense_weight: float,
        outcomes: tuple[str, ...],
        auto: Mapping[str, AutoSetting],
    ) -> None:
        """Connects the parts that a recommend request needs.

        Args:
            engine: Runs the queries.
            catalog: The live catalogue.
            histories: Stored events of users.
            envelope: Makes the fields that all answers share.
            prefixes: Builds the prefix from a history.
            dense_weight: Weight of the dense head for requests that do not set one.
            outcomes: Names of the outcomes that the retriever was trained on.
            auto: What validation chose for `auto`, by column; empty without a calibration.
        """
        self.prefixes = prefixes
        self.auto = auto
        self.dense_weight = dense_weight
        self.outcomes = outcomes
        self.chooser = StrategyChooser(engine.strategies)
        self.illegal_items = 0
        self._engine = engine
        self._catalog = catalog
        self._histories = histories
        self._envelope = envelope

    def begin(
        self, body: RecommendRequest, request_id: str | None = None, deadline_s: float | None = None
    ) -> Pending[RecommendResponse]:
        """Starts a recommendation.

        Args:
            body: The request.
            request_id: Identifies the request; None means the body's own id, or a random one.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.

        Raises:
            InvalidRequest: If the body does not match the catalogue or the models.
            QueueFull: If the queue of the engine is full.
        """
        return self._prepare(body, request_id, deadline_s).begin(self._engine)

    def begin_batch(
        self, bodies: Sequence[RecommendRequest], request_id: str, deadline_s: float | None = None
    ) -> list[Pending[RecommendResponse]]:
        """Starts several recommendations, all or none.

        Args:
            bodies: The requests.
            request_id: Identifies the request; each recommendation adds its number.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.

        Raises:
            Exception: As in `begin`, for any of the requests.
        """
        check_num_values((body.k, len(body.fields)) for body in bodies)
        return begin_all(
            self._engine,
            [
                self._prepare(body, f"{request_id}.{index}"[-128:], deadline_s)
                for index, body in enumerate(bodies)
            ],
        )

    def _prepare(
        self, body: RecommendRequest, request_id: str | None, deadline_s: float | None
    ) -> Prepared[RecommendResponse]:
        watch = Stopwatch()
        snapshot = self._catalog.current  # one version from start to end
        plan = self._plan(body, deadline_s)
        if body.fields:
            check_fields(body.fields, snapshot.items)
        allowed, hints = _read_filter(snapshot, body)
        history = self._histories.read(body.user, body.history, snapshot)
        builder = SlateBuilder(body, snapshot, history, plan, allowed, hints)

        def finish(results: list[Slate]) -> RecommendResponse:
            slate, strategy = (results[0], plan.strategy) if results else (None, POPULAR)
            if slate is not None:
                self.chooser.record(strategy, plan.width, slate.timing.total_ms / 1e3)
                if body.strategy == AUTO and strategy == SPECULATIVE and not slate.timing.drafted:
                    strategy = BEAM
            return self._respond(builder, slate, strategy, watch, request_id)

        if not history.rows.size:
            builder.degraded.append("cold_start")
            watch.features_done()
            return Prepared((), finish)
        query = SlateQuery(
            root=self.prefixes.build(snapshot, history.rows),
            trie=snapshot.trie,
            graph=snapshot.graph,
            index=snapshot.index,
            k=body.k,
            beam_width=plan.width,
            strategy=plan.strategy,
            outcome=plan.outcome,
            dense_weight=plan.dense_weight,
            excluded=builder.excluded,
            allowed=builder.allowed,
            caps=builder.caps,
            explain=body.explain,
            deadline_s=deadline_s,
        )
        watch.features_done()
        return Prepared((query,), finish)

    def _plan(self, body: RecommendRequest, deadline_s: float | None) -> SlatePlan:
        """Resolves how the request is searched. Raises InvalidRequest."""
        width = max(DEFAULT_BEAM_WIDTH, body.k) if body.beam_width is None else body.beam_width
        if width < body.k:
            raise InvalidRequest("beam_width", f"at least k = {body.k}, got {width}")
        chosen = self.auto_setting(body)
        strategy, hurried = self._strategy(body, width, deadline_s, chosen)
        outcome = self._outcome(body.outcome, strategy)
        dense_weight = self._dense_weight(body.dense_weight, strategy)
        if chosen is not None and not hurried:
            dense_weight = chosen.dense_weight
        return SlatePlan(strategy, width, outcome, dense_weight, hurried)

    def _strategy(
        self,
        body: RecommendRequest,
        width: int,
        deadline_s: float | None,
        chosen: AutoSetting | None,
    ) -> tuple[str, bool]:
        """Returns the strategy, and whether the deadline has decided for a faster one."""
        there = self._engine.strategies
        name = body.strategy
        if name == AUTO:
            if body.outcome is not None and self.outcomes:
                return _outcome_strategy(), False
            # `beam` stands for the exact strategy, which may draft.
            other = chosen.strategy if chosen and chosen.strategy != BEAM else None
            return self.chooser.choose(width, deadline_s, other)
        if name not in there:
            listed = ", ".join((AUTO, *there))
            raise InvalidRequest("strategy", f"expected one of {listed}, got {body.strategy!r}")
        return name, False

    def auto_setting(self, body: RecommendRequest) -> AutoSetting | None:
        """Returns what validation chose for a request of `auto`; None if nothing was chosen.

        A request with a dense weight or an outcome of its own has made the choice itself.
        """
        if not self.auto or body.strategy != AUTO:
            return None
        if body.dense_weight is not None or body.outcome is not None:
            return None
        chosen = self.auto["filtered" if body.exclude.seen else "kept"]
        return chosen if chosen.strategy in self._engine.strategies else None

    def _outcome(self, weights: dict[str, float] | None, strategy: str) -> np.ndarray | None:
        """Returns weights [O] in the retriever's order; None means the retriever's own mix."""
        if weights is None:
            return None
        if not strategy_classes()[strategy].outcome:
            reads = _outcome_strategy()
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
        if weight and not self.prefixes.config.dense_head:
            raise InvalidRequest(
                "dense_weight", f"this recommender has no dense head; expected 0, got {weight}"
            )
        return self.dense_weight if weight is None else weight

    def _respond(
        self,
        builder: SlateBuilder,
        slate: Slate | None,
        strategy: str,
        watch: Stopwatch,
        request_id: str | None,
    ) -> RecommendResponse:
        """Checks, fills and formats a slate; None stands for a slate of popular items."""
        body, degraded = builder.body, builder.degraded
        rows, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        if slate is not None:
            legal = builder.legal(slate.rows)
            if not legal.all():
                self._count_illegal(int((~legal).sum()))
                degraded = [*degraded, "illegal_items"]
            rows, scores = slate.rows[legal], slate.scores[legal]
        missing = body.k - rows.size
        filled = builder.fill(missing, rows) if missing > 0 else rows[:0]
        if missing > filled.size:
            degraded = [*degraded, "fewer_than_k"]
        if slate is not None and filled.size and not rows.size:
            degraded = [*degraded, "no_model_items"]
        return RecommendResponse(
            items=builder.items(rows, scores, filled),
            strategy=strategy,
            # An exact search returns fewer than k items only if no other item is allowed. Then no
            # popular item can fill the slate either.
            exact=slate is not None and slate.exact and not filled.size,
            rounds=0 if slate is None else slate.rounds,
            filter_hints=builder.filter_hints,
            explanation=self._explanation(builder, slate, rows),
            **self._envelope.fields(
                request_id or body.request_id,
                body.user,
                builder.snapshot,
                degraded,
                watch,
                None if slate is None else slate.timing,
            ),
        )

    def _explanation(
        self, builder: SlateBuilder, slate: Slate | None, rows: np.ndarray
    ) -> Explanation | UnsetType:
        if not builder.body.explain:
            return UNSET
        used = 0 if slate is None else self.prefixes.used(int(builder.history.rows.size))
        return explanation(builder.snapshot.trie, slate, rows, builder.history.num_events, used)

    def _count_illegal(self, count: int) -> None:
        self.illegal_items += count
        log.error("a model returned %d items that do not exist or were excluded", count)


@dataclass(frozen=True)
class SlatePlan:
    """How one request is searched.

    Attributes:
        strategy: Name of the strategy.
        width: Beam width.
        outcome: [O] weights in the retriever's order; None means the retriever's own mix.
        dense_weight: Weight of the dense head.
        hurried: True if the exact strategy was expected to miss the deadline.
    """

    strategy: str
    width: int
    outcome: np.ndarray | None
    dense_weight: float
    hurried: bool


class SlateBuilder:
    """Says what may be in the slate of one request, and fills and formats it.

    Attributes:
        body: The request.
        snapshot: The catalogue version of the answer.
        history: The user's history.
        allowed: Items that satisfy the filter; None without a filter.
        filter_hints: Texts about values of the filter that no item has; UNSET without any.
        excluded: [n] int64 rows that must not be in the slate.
        caps: Limits on the number of items per group.
        degraded: Reasons why the slate is less than requested.
    """

    def __init__(
        self,
        body: RecommendRequest,
        snapshot: Snapshot,
        history: History,
        plan: SlatePlan,
        allowed: AllowedItems | None,
        filter_hints: list[str] | UnsetType,
    ) -> None:
        """Finds the rows to exclude and the caps. Raises InvalidRequest.

        Args:
            body: The request.
            snapshot: The catalogue version of the answer.
            history: The user's history.
            plan: How the request is searched.
            allowed: Items that satisfy the filter; None without a filter.
            filter_hints: Texts about values of the filter that no item has; UNSET without any.
        """
        self.body = body
        self.snapshot = snapshot
        self.history = history
        self.allowed = allowed
        self.filter_hints = filter_hints
        self.degraded = list(history.degraded)
        if plan.hurried:
            self.degraded.append("hurried")
        if filter_hints is not UNSET:
            self.degraded.append("unknown_filter_values")
        self.excluded = np.concatenate([self._given_exclusions(), self._seen()])
        self.caps = snapshot.caps(body.diversity)

    def _given_exclusions(self) -> np.ndarray:
        """Returns the rows of the excluded ids that the catalogue has."""
        rows = np.array(self.snapshot.rows_of(self.body.exclude.item_ids), dtype=np.int64)
        if (rows < 0).any():
            self.degraded.append("unknown_excluded_items")
            return rows[rows >= 0]
        return rows

    def _seen(self) -> np.ndarray:
        """Returns the rows of the history to exclude. Raises InvalidRequest."""
        exclude, history = self.body.exclude, self.history
        if exclude.seen_within_s is None:
            return history.rows if exclude.seen else history.rows[:0]
        if not exclude.seen:
            raise InvalidRequest("exclude.seen_within_s", "expected seen = true with it, got false")
        if not history.dated.all():
            self.degraded.append("seen_within_s_ignored")
        return history.rows_within(exclude.seen_within_s)

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
        slate = np.concatenate([rows, filled])
        fields = self._fields(slate)
        answers: list[float | None] = [*scores.tolist(), *[None] * filled.size]
        return [
            RecommendedItem(
                item_id=item_id(row),
                score=score,
                rank=rank,
                source=POPULAR if score is None else "model",
                semantic_id=self._codes(row),
                fields=shown,
            )
            for rank, (row, score, shown) in enumerate(
                zip(slate.tolist(), answers, fields, strict=True), start=1
            )
        ]

    def _fields(self, rows: np.ndarray) -> Sequence[dict[str, Any] | UnsetType]:
        """Returns the requested columns of each row [n]; UNSET without any."""
        names = self.body.fields
        return self.snapshot.items.fields(rows, names) if names else [UNSET] * rows.size

    def _codes(self, row: int) -> list[int] | UnsetType:
        if not self.body.explain:
            return UNSET
        codes: list[int] = self.snapshot.items.codes[row].tolist()
        return codes


def _outcome_strategy() -> str:
    """Returns the name of the strategy that reads outcome weights."""
    return next(name for name, each in strategy_classes().items() if each.outcome)


def _read_filter(
    snapshot: Snapshot, body: RecommendRequest
) -> tuple[AllowedItems | None, list[str] | UnsetType]:
    """Returns the items that satisfy the filter, and texts about values that no item has."""
    if body.filter is None:
        return None, UNSET
    try:
        allowed = snapshot.allowed(body.filter)
    except FilterError as error:
        place = f"filter.{error.param}" if error.param else "filter"
        raise InvalidRequest(place, str(error)) from None
    return allowed, [str(absent) for absent in snapshot.absent_values(body.filter)] or UNSET
