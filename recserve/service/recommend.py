"""Answers recommend requests: a history becomes one query, and its result becomes a slate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType, structs

from recserve.core.allowed import AllowedItems
from recserve.core.client import LOCAL, Client
from recserve.core.diversity import Minimum, first_k, meet_minimums, still_open
from recserve.core.request import LoweredItems, Slate, SlateQuery
from recserve.engine.engine import Engine
from recserve.features.catalog.filters import FilterError
from recserve.features.history.history import CorruptHistory, StoreUnavailable
from recserve.models.imported_model import ImportedConfig
from recserve.models.scoring import Scoring
from recserve.schemas.explanation import Explanation
from recserve.schemas.items import (
    MAX_K,
    Diversity,
    InvalidRequest,
    LoggedItem,
    MissingField,
    Quota,
    RecommendedItem,
    RecommendRequest,
    RecommendResponse,
    ScoreParts,
    ScoringChoice,
    UnsupportedField,
    UsedScoring,
    not_offered_error,
)
from recserve.schemas.validation import json_text, to_message
from recserve.search.strategy import strategy_classes
from recserve.service.attribution import ITEM_ID, Envelope
from recserve.service.auto_strategy import (
    AUTO,
    BEAM,
    SPECULATIVE,
    AutoSetting,
    StrategyChooser,
)
from recserve.service.errors import UnknownModel
from recserve.service.explanation import explanation
from recserve.service.fields import check_fields
from recserve.service.histories import Histories
from recserve.service.history import EMPTY_HISTORY, History
from recserve.service.live_catalog import LiveCatalog
from recserve.service.pending import (
    ItemCall,
    ItemService,
    Late,
    Pending,
    Prepared,
    id_of_part,
    submit_prepared,
)
from recserve.service.prefixes import RecommenderPrefixBuilder
from recserve.service.scoring import resolve_scoring, used_scoring
from recserve.service.shown import Showings, showing_key
from recserve.service.similar import (
    BOTH,
    BY_LINKS,
    NO_LINKS,
    SIMILARITIES,
    ItemSimilarity,
    best_items,
)
from recserve.service.snapshot import LISTS, MAX_ABSENT, POPULAR, Snapshot

log = logging.getLogger(__name__)
DEFAULT_BEAM_WIDTH = 50
WITHOUT_MODEL = (*LISTS, *SIMILARITIES)
DEADLINE_PASSED = "deadline_passed"
# A list is built and sent in the last part of a request's time: 10 ms, or a fifth of less than 50.
LATE_S, LATE_SHARE = 0.01, 0.2


class RecommendService(ItemService[RecommendRequest, RecommendResponse]):
    """Recommends items with the recommender, by similarity, or from a list: `popular`, `latest`.

    An empty history gets the popular items too, and they fill what the model leaves empty. So does
    a request of `auto` while no recommender is trained.

    Attributes:
        prefixes: Builds the prefix from a history.
        dense_weight: Weight of the dense head for requests that do not set one.
        outcomes: Names of the outcomes that the retriever was trained on.
        auto: What validation chose for `auto`, by column; empty without a calibration.
        chooser: Resolves the strategy `auto`.
        log_probs: Whether the items of answers are `LoggedItem`.
        illegal_items: Number of excluded or missing items that the model has returned; must stay 0.
    """

    def __init__(
        self,
        engine: Engine,
        catalog: LiveCatalog,
        histories: Histories,
        envelope: Envelope,
        prefixes: RecommenderPrefixBuilder | None,
        dense_weight: float,
        outcomes: tuple[str, ...],
        auto: Mapping[str, AutoSetting],
        similarity: ItemSimilarity,
        negative_weight: float = 0.0,
    ) -> None:
        """Connects the parts that a recommend request needs.

        Args:
            engine, catalog, histories: As in `ItemService`.
            envelope: Makes the fields that all answers share.
            prefixes: Builds the prefix from a history; None if the bundle holds no recommender, and
                only the lists are offered.
            dense_weight: Weight of the dense head for requests that do not set one.
            outcomes: Names of the outcomes that the retriever was trained on.
            auto: What validation chose for `auto`, by column; empty without a calibration.
            similarity: Similarities of the items.
            negative_weight: How much items similar to unwanted ones are lowered.
        """
        super().__init__(engine, catalog, histories)
        self.prefixes = prefixes
        self.auto = auto
        self.dense_weight = dense_weight
        self.outcomes = outcomes
        self.chooser = StrategyChooser(engine.selectable)
        self.illegal_items = 0
        self.log_probs = False
        self._envelope = envelope
        self._similarity = similarity
        self._negative_weight = negative_weight
        self._imported = prefixes is not None and isinstance(prefixes.config, ImportedConfig)

    def check_model(self) -> None:
        """Raises UnknownModel if the bundle holds no recommender."""
        if self.prefixes is None:
            raise UnknownModel(
                "this bundle holds no recommender; train one with recserve train recommender "
                f"--bundle BUNDLE, or ask for strategy {', '.join(LISTS)} or {BOTH}"
            )

    def check_scoring(self, text: str | None) -> bool:
        """Returns whether slates say how they were scored. See `Service.check_scoring`."""
        if text is not None:
            choice = to_message(json_text("scoring", text), ScoringChoice)
            self.check_model()
            assert self.prefixes is not None
            resolve_scoring(choice, self.prefixes.config)
        return text is not None or self._imported

    def begin_all(
        self,
        bodies: Sequence[RecommendRequest],
        request_id: str,
        deadline_s: float | None = None,
        client: Client = LOCAL,
    ) -> list[Pending[RecommendResponse]]:
        """Starts several recommendations, all or none.

        Args:
            bodies: The requests.
            request_id: Identifies the request; each recommendation adds its number.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.
            client: Who sends the request.

        Raises:
            Exception: As in `begin`, for any of the requests.
        """
        self.check_together(bodies)
        return submit_prepared(
            self._engine,
            [
                self._prepare(body, id_of_part(request_id, index), deadline_s)
                for index, body in enumerate(bodies)
            ],
            client,
        )

    def begin_late(
        self, body: RecommendRequest, request_id: str | None = None
    ) -> Pending[RecommendResponse] | None:
        """Starts the list that `on_deadline` names, without the stored history of a user."""
        if body.on_deadline == "error":
            return None
        unread = body.user is not None and body.history is None
        unknown = body.exclude_shown is not None or body.discount_shown is not None
        listed = structs.replace(
            body,
            strategy=body.on_deadline,
            dense_weight=None,
            outcome=None,
            history=[] if unread else body.history,
            exclude_shown=None,
            discount_shown=None,
            scoring=None,
        )
        pending = self.begin(listed, request_id)
        reasons = [*["history_unavailable"] * unread, *["shown_unavailable"] * unknown]
        reasons.append(DEADLINE_PASSED)

        def finish(results: list[Slate]) -> RecommendResponse:
            answer = pending.finish(results)
            return structs.replace(answer, degraded=[*answer.degraded, *reasons])

        return Pending((), finish)

    def _num_items(self, body: RecommendRequest) -> int:
        return body.k

    def _translate(self, call: ItemCall[RecommendRequest]) -> Prepared[RecommendResponse]:
        body, snapshot = call.body, call.snapshot
        plan = self._plan(body, call.deadline_s)
        if body.fields:
            check_fields(body.fields, snapshot.items)
        allowed, hints = snapshot.shown, list[str]()
        if body.filter is not None:
            allowed, hints = _evaluate_filter(snapshot, body.filter, "filter")
        from_list = plan.strategy in LISTS
        if from_list and body.user is None and body.history is None:
            history = EMPTY_HISTORY
        else:
            history = self._histories.read(body.user, body.history, snapshot)
        showings = None
        if body.exclude_shown is not None or body.discount_shown is not None or body.shown_ids:
            showings, reasons = self._read_showings(call, history)
            history = replace(history, degraded=(*history.degraded, *reasons))
        clock = self._catalog.clock
        builder = SlateBuilder(call, history, plan, allowed, hints, clock, showings)

        def finish(results: list[Slate]) -> RecommendResponse:
            if results and builder.lowered is not None:
                results = builder.join_lowered(results)
            slate, strategy = (results[0], plan.strategy) if results else (None, builder.list_name)
            if slate is not None:
                if plan.scoring is None:
                    self.chooser.record(strategy, plan.width, slate.timing.total_ms / 1e3)
                if body.strategy == AUTO and strategy == SPECULATIVE and not slate.timing.drafted:
                    strategy = BEAM
            return self._respond(builder, results, plan, strategy)

        if plan.strategy in SIMILARITIES and history.rows.size:
            slates = self._similar_items(builder, plan.strategy)
            call.watch.features_done()
            return Prepared((), lambda _: self._respond(builder, slates, plan, plan.strategy))
        if from_list or not history.rows.size:
            if not from_list:
                builder.degraded.append("cold_start")
            call.watch.features_done()
            return Prepared((), finish)
        assert self.prefixes is not None
        deadline_s, late = call.deadline_s, None
        if body.on_deadline != "error" and deadline_s is not None:
            left_s = max(0.0, deadline_s - time.monotonic())
            deadline_s -= min(LATE_S, LATE_SHARE * left_s)
            late = Late(deadline_s, lambda: self._respond_late(builder, plan))
        if self._negative_weight and history.disliked_rows.size:
            builder.unwanted = self._similarity.near_items(
                history.disliked_rows,
                self._negative_weight * history.disliked_weights,
                snapshot.items,
            )
        query = SlateQuery(
            prefix=self.prefixes.build(
                snapshot, history.rows, None if body.user is None else body.user.id
            ),
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
            log_probs=self.log_probs or body.explain,
            unwanted=builder.unwanted,
            scoring=plan.scoring,
            deadline_s=deadline_s,
        )
        queries = [query]
        if body.explain:
            builder.prefix_keys = query.prefix.keys
        for quota in builder.quotas:  # their items are searched beside the slate
            quota.items.leaves(snapshot.trie)  # computed here, off the engine's thread
            queries.append(replace(query, k=quota.count, allowed=quota.items, explain=False))
        if (lowered := builder.lowered) is not None:  # so are lowered items
            both = np.concatenate([builder.excluded, lowered.rows])
            queries[0] = replace(query, excluded=both)
            mask = np.zeros(snapshot.num_items, dtype=bool)
            mask[lowered.rows] = True
            own = replace(query, k=lowered.rows.size, allowed=AllowedItems.of(mask), caps=())
            queries.append(replace(own, explain=False))
        call.watch.features_done()
        return Prepared(queries, finish, late)

    def _similar_items(self, builder: SlateBuilder, strategy: str) -> list[Slate]:
        """Returns the items that are most similar to the history, then those of each quota."""
        snapshot = builder.snapshot
        scores = self._similarity.scores(strategy, builder.history.rows, snapshot.items)
        if (lowered := builder.lowered) is not None:
            scores[lowered.rows] -= lowered.amounts
        allowed = np.ones(snapshot.num_items, dtype=bool)
        if builder.allowed is not None:
            allowed = builder.allowed.mask()
        allowed[snapshot.hidden] = False
        allowed[builder.excluded] = False
        slates = [best_items(scores, allowed, builder.caps, builder.body.k)]
        for quota in builder.quotas:
            among = allowed & quota.items.mask()
            slates.append(best_items(scores, among, builder.caps, quota.count))
        return slates

    def _read_showings(
        self, call: ItemCall[RecommendRequest], history: History
    ) -> tuple[Showings | None, list[str]]:
        """Returns what the user was shown, and why that is not all.

        Raises:
            InvalidRequest: If the request names no user, or says what the server counts itself.
        """
        body, items, shown = call.body, call.snapshot.items, self._histories.shown
        limits = {"exclude_shown": body.exclude_shown, "discount_shown": body.discount_shown}
        given = [name for name, limit in limits.items() if limit is not None]
        if body.user is None:
            raise MissingField("user", f"is required with {(*given, 'shown_ids')[0]}")
        if body.shown_ids and shown.from_answers:
            raise UnsupportedField(
                "shown_ids", "this server counts its own answers (shown_from_answers); expected []"
            )
        rows = np.array(call.snapshot.rows_of(body.shown_ids), np.int64)
        reasons = ["unknown_shown_items"] if (rows < 0).any() else []
        if not given:
            return None, reasons
        try:
            record = shown.read(body.user.id)
        except StoreUnavailable as error:
            log.warning("the history store failed: %s", error)
            return None, [*reasons, "shown_unavailable"]
        except CorruptHistory as error:
            log.error("the record of what a user was shown is damaged: %s", error)
            return None, [*reasons, "shown_unavailable"]
        showings = Showings.of(record, history, items)
        if body.shown_ids:
            keys = [showing_key(call.request_id or "", item_id) for item_id in body.shown_ids]
            new = (rows >= 0) & ~np.isin(np.array(keys, np.uint64), record["event_key"])
            rows = np.unique(rows[new])
            now = np.full(rows.size, shown.clock(), np.int64)
            showings = Showings(
                np.concatenate([showings.rows, rows]), np.concatenate([showings.times, now])
            )
        return showings, reasons

    def _respond_late(self, builder: SlateBuilder, plan: SlatePlan) -> RecommendResponse:
        """Returns the list that `on_deadline` names, for a search that has missed the deadline."""
        builder.list_name = builder.body.on_deadline
        builder.degraded.append(DEADLINE_PASSED)
        return self._respond(builder, [], plan, builder.list_name)

    def _plan(self, body: RecommendRequest, deadline_s: float | None) -> SlatePlan:
        """Resolves how the request is searched.

        Raises:
            InvalidRequest: If the fields do not fit the bundle's models or each other.
            UnknownModel: If the request names a strategy of a recommender, and there is none.
        """
        untrained = body.strategy == AUTO and self.prefixes is None
        if not untrained and body.strategy not in WITHOUT_MODEL:
            self.check_model()
        width = max(DEFAULT_BEAM_WIDTH, body.k) if body.beam_width is None else body.beam_width
        if width < body.k:
            raise InvalidRequest("beam_width", f"at least k = {body.k}, got {width}")
        if untrained:
            return SlatePlan(POPULAR, width, None, 0.0, hurried=False, untrained=True)
        chosen = self.auto_setting(body)
        strategy, hurried = self._strategy(body, width, deadline_s, chosen)
        outcome = self._outcome(body.outcome, strategy)
        dense_weight = self._dense_weight(body.dense_weight, strategy)
        if chosen is not None and not hurried:
            dense_weight = chosen.dense_weight
        plan = SlatePlan(strategy, width, outcome, dense_weight, hurried)
        return self._with_scoring(plan, body.scoring) if body.scoring or self._imported else plan

    def _with_scoring(self, plan: SlatePlan, choice: ScoringChoice | None) -> SlatePlan:
        """Returns a plan that says how items are scored. Raises InvalidRequest."""
        if choice is not None and plan.strategy != BEAM:
            raise InvalidRequest(
                "scoring", f"only strategy 'beam' can be scored otherwise, got {plan.strategy!r}"
            )
        if plan.strategy in WITHOUT_MODEL:
            return plan
        assert self.prefixes is not None
        own = self.prefixes.config.scoring
        scoring = own if choice is None else resolve_scoring(choice, self.prefixes.config)
        if scoring.length_penalty and plan.dense_weight and self.prefixes.config.dense_head:
            raise InvalidRequest(
                "scoring.length_penalty",
                f"a score with a dense head is not divided; expected dense_weight 0, got "
                f"{plan.dense_weight:g}",
            )
        named = None if scoring == own else scoring
        return replace(plan, scoring=named, used_scoring=used_scoring(scoring))

    def _strategy(
        self,
        body: RecommendRequest,
        width: int,
        deadline_s: float | None,
        chosen: AutoSetting | None,
    ) -> tuple[str, bool]:
        """Returns the strategy, and whether the deadline has decided for a faster one."""
        there = self._engine.selectable
        name = body.strategy
        if name == AUTO:
            if body.scoring is not None:
                name = BEAM
            elif body.outcome is not None and self.outcomes:
                return _outcome_strategy(), False
        if name == AUTO:
            # `beam` stands for the exact strategy, which may draft.
            other = chosen.strategy if chosen and chosen.strategy != BEAM else None
            return self.chooser.choose(width, deadline_s, other)
        similar = SIMILARITIES if self._similarity.links is not None else SIMILARITIES[:-1]
        if name not in there and name not in LISTS and name not in similar:
            lacking = {known: cls.missing for known, cls in strategy_classes().items()}
            lacking[BY_LINKS] = NO_LINKS
            raise not_offered_error("strategy", name, (AUTO, *there, *LISTS, *similar), lacking)
        return name, False

    def auto_setting(self, body: RecommendRequest) -> AutoSetting | None:
        """Returns what validation chose for a request of `auto`; None if nothing was chosen.

        A request with a dense weight or an outcome of its own has made the choice itself.
        """
        if not self.auto or body.strategy != AUTO:
            return None
        if body.dense_weight is not None or body.outcome is not None or body.scoring is not None:
            return None
        chosen = self.auto["filtered" if body.exclude.seen else "kept"]
        return chosen if chosen.strategy in self._engine.selectable else None

    def without_clock(self, body: RecommendRequest) -> RecommendRequest:
        """Returns a request whose strategy does not follow from measured times.

        `auto` means what validation chose, or else `beam` where it is available.
        """
        chosen = self.auto_setting(body)
        if chosen is not None:
            body = structs.replace(body, strategy=chosen.strategy)
            if strategy_classes()[chosen.strategy].dense_weight == "used":
                body = structs.replace(body, dense_weight=chosen.dense_weight)
        elif body.strategy == AUTO and body.outcome is None and BEAM in self._engine.selectable:
            body = structs.replace(body, strategy=BEAM)
        return body

    def _outcome(self, weights: dict[str, float] | None, strategy: str) -> np.ndarray | None:
        """Returns weights [O] in the retriever's order; None means the retriever's own mix."""
        if weights is None:
            return None
        if strategy in WITHOUT_MODEL or not strategy_classes()[strategy].outcome:
            reads = _outcome_strategy()
            raise InvalidRequest("outcome", f"only strategy {reads!r} uses it, got {strategy!r}")
        unknown = sorted(set(weights) - set(self.outcomes))
        if unknown:
            known = ", ".join(self.outcomes)
            raise InvalidRequest("outcome", f"expected names from {known}, got {unknown[0]!r}")
        return np.array([weights.get(name, 0.0) for name in self.outcomes])

    def _dense_weight(self, weight: float | None, strategy: str) -> float:
        own = strategy in WITHOUT_MODEL or strategy_classes()[strategy].dense_weight == "refused"
        if weight and own:
            raise InvalidRequest(
                "dense_weight", f"strategy {strategy!r} does not use it; expected 0, got {weight}"
            )
        if weight and self.prefixes is not None and not self.prefixes.config.dense_head:
            raise InvalidRequest(
                "dense_weight", f"this recommender has no dense head; expected 0, got {weight}"
            )
        return self.dense_weight if weight is None else weight

    def _used_weight(self, plan: SlatePlan) -> float | UnsetType:
        """Returns the weight of the dense head in the scores of a slate, if it has one."""
        if plan.strategy in SIMILARITIES:
            return UNSET
        assert self.prefixes is not None
        used = strategy_classes()[plan.strategy].dense_weight == "used"
        return plan.dense_weight if used and self.prefixes.config.dense_head else UNSET

    def _respond(
        self, builder: SlateBuilder, results: list[Slate], plan: SlatePlan, strategy: str
    ) -> RecommendResponse:
        """Checks, fills and formats a slate.

        Args:
            builder: What may be in the slate.
            results: The slate, then a slate of the items of each quota; none for a slate from a
                list.
            plan: How the slate was searched.
            strategy: The strategy that the answer names.
        """
        body, degraded = builder.body, builder.degraded
        slate = results[0] if results else None
        rows, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for result in results:
            legal = builder.legal(result.rows)
            if not legal.all():
                self._count_illegal(int((~legal).sum()))
                degraded = [*degraded, "illegal_items"]
            found.append((result.rows[legal], result.scores[legal]))
        if found:
            rows, scores = found[0]
        if found and builder.quotas:
            rows, scores = builder.with_quotas(rows, scores, found[1:])
        missing = body.k - rows.size
        filled = builder.fill(missing, rows) if missing > 0 else rows[:0]
        if builder.quotas:
            rows, scores, filled = builder.fill_quotas(rows, scores, filled)
            slate_rows = np.concatenate([rows, filled])
            if not all(quota.is_met(slate_rows) for quota in builder.quotas):
                degraded = [*degraded, "at_least_unmet"]
        if rows.size + filled.size < body.k:
            degraded = [*degraded, "fewer_than_k"]
        if slate is not None and filled.size and not rows.size:
            degraded = [*degraded, "no_model_items"]
        items = builder.items(rows, scores, filled)
        divided = plan.used_scoring is not UNSET and plan.used_scoring.length_penalty > 0
        if divided and slate is not None and not all(result.exact for result in results):
            degraded = [*degraded, "length_penalty"]
        if body.explain and builder.prefix_keys is not None and not divided:
            items = self._with_parts(builder, items, rows, results, plan.dense_weight)
        if self.log_probs:
            items = _with_log_probs(items, np.concatenate([rows, filled]), results)
        return RecommendResponse(
            items=items,
            strategy=strategy,
            # An exact search returns fewer than k items only if no other item is allowed. Then no
            # popular item can fill the slate either.
            exact=bool(results) and all(r.exact for r in results) and not filled.size,
            rounds=0 if slate is None else slate.rounds,
            dense_weight=UNSET if slate is None else self._used_weight(plan),
            scoring=UNSET if slate is None else plan.used_scoring,
            filter_hints=builder.filter_hints or UNSET,
            explanation=self._explanation(builder, slate, rows),
            **self._envelope.fields(
                builder.call,
                degraded,
                None if slate is None else slate.timing,
                map(ITEM_ID, items),
            ),
        )

    def _explanation(
        self, builder: SlateBuilder, slate: Slate | None, rows: np.ndarray
    ) -> Explanation | UnsetType:
        if not builder.body.explain:
            return UNSET
        used = 0
        if slate is not None and self.prefixes is not None:
            used = self.prefixes.count_used(int(builder.history.rows.size))
        return explanation(builder.snapshot.trie, slate, rows, builder.history.num_events, used)

    def _with_parts(
        self,
        builder: SlateBuilder,
        items: Sequence[RecommendedItem],
        rows: np.ndarray,
        results: Sequence[Slate],
        weight: float,
    ) -> list[RecommendedItem]:
        """Returns the items with the parts of their scores.

        Args:
            builder: The builder of the slate.
            items: Items of the slate, those of `rows` first.
            rows: [n] rows of the items from the model.
            results: The slate, then a slate of the items of each quota.
            weight: Weight of the dense head.
        """
        assert self.prefixes is not None and builder.prefix_keys is not None
        log_probs = _log_probs(results)
        bonuses: dict[int, float] = {}
        if weight and self.prefixes.bonus is not None:
            first_item = self.prefixes.template.first_item
            keys = builder.prefix_keys
            history = keys[keys >= first_item] - first_item
            where, values = self.prefixes.bonus.entries([history], builder.snapshot.num_items)
            bonuses = dict(zip(where.tolist(), (weight * values).tolist(), strict=True))
        if weight and builder.unwanted is not None:
            for row, amount in builder.unwanted.by_row().items():
                bonuses[row] = bonuses.get(row, 0.0) - weight * amount
        taken = {} if builder.lowered is None else builder.lowered.by_row()
        found = list(items)
        for place, row in enumerate(rows.tolist()):
            score, log_prob = items[place].score, log_probs.get(row)
            if log_prob is None or score is None:
                continue
            bonus, shown = bonuses.get(row, 0.0), 0.0 - taken.get(row, 0.0)
            dense = score - log_prob - bonus - shown if weight else 0.0
            parts = ScoreParts(log_prob=log_prob, dense=dense, bonus=bonus, shown=shown)
            found[place] = structs.replace(items[place], parts=parts)
        return found

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
        untrained: True if `auto` takes a list because the bundle holds no recommender.
        scoring: How items are scored. None: as the model says.
        used_scoring: What the answer says of it.
    """

    strategy: str
    width: int
    outcome: np.ndarray | None
    dense_weight: float
    hurried: bool
    untrained: bool = False
    scoring: Scoring | None = None
    used_scoring: UsedScoring | UnsetType = UNSET


class SlateBuilder:
    """Says what may be in the slate of one request, and fills and formats it.

    Attributes:
        call: The request.
        body: Its body.
        snapshot: The catalogue version of the answer.
        history: The user's history.
        allowed: Items that satisfy the filter; None without a filter.
        filter_hints: Texts about values that no item has, of the filter and of quotas' filters.
        list_name: List that fills the slate, one of LISTS.
        excluded: [n] int64 rows that must not be in the slate.
        caps: Limits on the number of items per group.
        lowered: Items whose scores are lowered; None for none.
        unwanted: Items whose dense scores are lowered; None for none.
        prefix_keys: Keys of the prefix, where the scores are explained.
        quotas: Least numbers of items of some kinds, with these items as far as they are allowed.
        degraded: Reasons why the slate is less than requested.
    """

    def __init__(
        self,
        call: ItemCall[RecommendRequest],
        history: History,
        plan: SlatePlan,
        allowed: AllowedItems | None,
        filter_hints: list[str],
        clock: Callable[[], int],
        showings: Showings | None = None,
    ) -> None:
        """Finds the rows to exclude and the caps. Raises InvalidRequest.

        Args:
            call: The request.
            history: The user's history.
            plan: How the request is searched.
            allowed: Items that satisfy the filter; None without a filter.
            filter_hints: Texts about values of the filter that no item has.
            clock: Returns the present time in microseconds since 1970.
            showings: What the user was shown; None if it does not count.
        """
        self.call, self.body, self.snapshot = call, call.body, call.snapshot
        self.history = history
        self.allowed = allowed
        self.filter_hints = filter_hints
        self.list_name = plan.strategy if plan.strategy in LISTS else POPULAR
        self.degraded = [*call.degraded, *history.degraded]
        if plan.hurried:
            self.degraded.append("hurried")
        if plan.untrained:
            self.degraded.append("no_recommender")
        self.quotas: list[Minimum] = []
        diversity = call.body.diversity
        if diversity is not None and diversity.at_least is not None:
            self.quotas = self._read_quotas(diversity, clock)
        if self.filter_hints:
            self.degraded.append("unknown_filter_values")
        unwanted = (self._find_excluded(), self._find_seen(), history.hidden)
        self.excluded = np.concatenate(unwanted)
        self.caps = self.snapshot.caps(call.body.diversity)
        self.lowered: LoweredItems | None = None
        self.unwanted: LoweredItems | None = None
        self.prefix_keys: np.ndarray | None = None
        if showings is not None:
            self._apply_showings(showings, clock())

    def _find_excluded(self) -> np.ndarray:
        """Returns the rows of the excluded ids that the catalogue has."""
        rows = np.array(self.snapshot.rows_of(self.body.exclude.item_ids), dtype=np.int64)
        if (rows < 0).any():
            self.degraded.append("unknown_excluded_items")
            return rows[rows >= 0]
        return rows

    def _find_seen(self) -> np.ndarray:
        """Returns the rows of the history to exclude. Raises InvalidRequest."""
        exclude, history = self.body.exclude, self.history
        if self.body.exclude_shown is not None or self.body.discount_shown is not None:
            history = history.without_read  # their showings are judged by these
        if exclude.seen_within_s is None:
            return history.seen_rows if exclude.seen else history.rows[:0]
        if not exclude.seen:
            raise InvalidRequest("exclude.seen_within_s", "expected seen = true with it, got false")
        if not history.dated.all():
            self.degraded.append("seen_within_s_ignored")
        return history.rows_within(exclude.seen_within_s)

    def _apply_showings(self, showings: Showings, now_us: int) -> None:
        """Excludes and lowers items that were shown without a click."""
        limit, discount = self.body.exclude_shown, self.body.discount_shown
        if limit is not None:
            rows, counts = showings.counts(_since_us(limit.window_s, now_us))
            self.excluded = np.concatenate([self.excluded, rows[counts >= limit.times]])
        if discount is not None:
            rows, counts = showings.counts(_since_us(discount.window_s, now_us))
            legal = self.legal(rows)
            rows, counts = rows[legal], counts[legal]
            if rows.size > MAX_K:  # a search finds no more; those that were shown most are left out
                order = np.argsort(counts, kind="stable")
                self.excluded = np.concatenate([self.excluded, rows[order[MAX_K:]]])
                kept = np.sort(order[:MAX_K])
                rows, counts = rows[kept], counts[kept]
            if rows.size:
                self.lowered = LoweredItems(rows, (discount.by * counts).astype(np.float32))

    def join_lowered(self, results: Sequence[Slate]) -> list[Slate]:
        """Joins the slate of the other items, the first, with that of the lowered ones, the last.

        Caps are applied again. With them, several groups of an item may let in items that neither
        search returned, so the slate is not called exact.
        """
        assert self.lowered is not None
        first, *quotas, last = [self.lowered.lower(result) for result in results]
        rows = np.concatenate([first.rows, last.rows])
        scores = np.concatenate([first.scores, last.scores])
        order = np.lexsort((rows, -scores))
        order = order[first_k(rows[order], self.caps, self.body.k)]
        log_probs = None
        if first.log_probs is not None and last.log_probs is not None:
            log_probs = np.concatenate([first.log_probs, last.log_probs])[order]
        joined = replace(
            first,
            rows=rows[order],
            scores=scores[order],
            exact=first.exact and last.exact and not self.caps,
            rounds=first.rounds + last.rounds,
            log_probs=log_probs,
        )
        return [joined, *quotas]

    def _read_quotas(self, diversity: Diversity, clock: Callable[[], int]) -> list[Minimum]:
        """Returns the quotas with their items. Raises InvalidRequest."""
        where, given = "diversity.at_least", diversity.quotas
        if isinstance(diversity.at_least, Quota):
            return [self._read_quota(where, diversity.at_least, clock)]
        found = [
            self._read_quota(f"{where}[{place}]", one, clock) for place, one in enumerate(given)
        ]
        if (total := sum(one.count for one in given)) > self.body.k:
            expected = f"expected counts that add up to at most k = {self.body.k}"
            raise InvalidRequest(where, f"{expected}, got {total}")
        return found

    def _read_quota(self, where: str, quota: Quota, clock: Callable[[], int]) -> Minimum:
        """Returns a quota with its items. Raises InvalidRequest."""
        if quota.count > self.body.k:
            raise InvalidRequest(f"{where}.count", f"at most k = {self.body.k}, got {quota.count}")
        if quota.new_within_s is None and quota.filter is None:
            raise MissingField(where, "new_within_s, filter or both are required")
        mask = np.ones(self.snapshot.num_items, dtype=bool)
        if quota.new_within_s is not None:
            since_us = clock() - int(quota.new_within_s * 1e6)
            mask[:] = False
            mask[self.snapshot.items.newer_rows(since_us)] = True
        if quota.filter is not None:
            wanted, hints = _evaluate_filter(self.snapshot, quota.filter, f"{where}.filter")
            mask &= wanted.mask()
            both = dict.fromkeys([*self.filter_hints, *hints])
            self.filter_hints = list(both)[:MAX_ABSENT]
        if self.allowed is not None:
            mask &= self.allowed.mask()
        return Minimum(quota.count, AllowedItems.of(mask))

    def with_quotas(
        self,
        rows: np.ndarray,
        scores: np.ndarray,
        found: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows and scores of a slate with as many items of the quotas as needed.

        Args:
            rows: [n] rows of the slate, best first.
            scores: [n] their scores.
            found: Rows and scores of each quota's best items, best first.
        """
        more = [rows for rows, _ in found]
        slate = meet_minimums(rows, more, self.quotas, self.caps, self.body.k)
        # The first of equal rows counts: the score of the slate.
        every, places = np.unique(np.concatenate([rows, *more]), return_index=True)
        values = np.concatenate([scores, *(values for _, values in found)])[places]
        values = values[np.searchsorted(every, slate)]
        if (scores[1:] <= scores[:-1]).all():  # a strategy whose order is that of its scores
            order = np.lexsort((slate, -values))
            slate, values = slate[order], values[order]
        return slate, values

    def fill_quotas(
        self, rows: np.ndarray, scores: np.ndarray, filled: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a filled slate with items of the quotas from the list, as many as needed.

        Args:
            rows: [n] rows from the model, best first.
            scores: [n] their scores.
            filled: [m] rows of the list that follow them.
        """
        slate = np.concatenate([rows, filled])
        if all(quota.is_met(slate) for quota in self.quotas):
            return rows, scores, filled
        none = np.zeros(0, np.int64)
        more = [self.fill(quota.count, none, quota.items) for quota in self.quotas]
        slate = meet_minimums(slate, more, self.quotas, self.caps, self.body.k)
        stay = np.isin(rows, slate)
        return rows[stay], scores[stay], slate[~np.isin(slate, rows)]

    def legal(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] bool: True for existing rows that are not excluded and satisfy the filter."""
        legal = self.snapshot.answerable(rows) & ~np.isin(rows, self.excluded)
        if self.allowed is not None:
            legal &= self.allowed.at(rows)
        return np.asarray(legal)

    def fill(
        self,
        count: int,
        rows: np.ndarray,
        among: AllowedItems | None = None,
        lowered: bool = False,
    ) -> np.ndarray:
        """Returns rows of a list for the positions that the model left empty.

        A list has no scores, so lowered items come after all others.

        Args:
            count: Number of empty positions.
            rows: [n] rows that are already in the slate; they count towards the caps.
            among: Allowed items to choose from; None chooses from all of them.
            lowered: Whether lowered items are chosen like others.

        Returns:
            Up to `count` rows; fewer if the filter or the caps allow no more.
        """
        slate, wanted = rows, rows.size + count
        allowed = self.allowed if among is None else among
        excluded = self.excluded
        if self.lowered is not None and not lowered:
            excluded = np.concatenate([excluded, self.lowered.rows])
        while True:
            num_missing, taken = wanted - slate.size, np.concatenate([excluded, slate])
            more = self.snapshot.list_allowed(self.list_name, num_missing, taken, allowed)
            both = np.concatenate([slate, more])
            slate = both[first_k(both, self.caps, wanted)]
            if slate.size == wanted or more.size < num_missing:
                break
            left = still_open(slate, self.caps, allowed, self.snapshot.num_items)
            allowed = AllowedItems.of(left)
        if self.lowered is not None and not lowered and slate.size < wanted:
            more = self.fill(wanted - slate.size, slate, among, lowered=True)
            slate = np.concatenate([slate, more])
        return np.asarray(slate[rows.size :])

    def items(
        self, rows: np.ndarray, scores: np.ndarray, filled: np.ndarray
    ) -> list[RecommendedItem]:
        """Formats the items of the slate.

        Args:
            rows: [n] rows from the model, best first.
            scores: [n] their scores.
            filled: [m] rows of a list that follow them, without scores.
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
                source=self.list_name if score is None else "model",
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


def _with_log_probs(
    items: Sequence[RecommendedItem], rows: np.ndarray, results: Sequence[Slate]
) -> list[RecommendedItem]:
    """Returns the items, of rows [n], with their log-probabilities from the results."""
    known = _log_probs(results)
    return [
        LoggedItem(**structs.asdict(item), log_prob=None if item.score is None else known.get(row))
        for item, row in zip(items, rows.tolist(), strict=True)
    ]


def _log_probs(results: Sequence[Slate]) -> dict[int, float]:
    """Returns the log-probabilities of the items of all results, by row."""
    known: dict[int, float] = {}
    for result in results:
        if result.log_probs is not None:
            known |= zip(result.rows.tolist(), result.log_probs.tolist(), strict=True)
    return known


def _since_us(window_s: int | None, now_us: int) -> int:
    """Returns the time at which a window begins; None begins before all times."""
    return 0 if window_s is None else now_us - window_s * 1_000_000


def _outcome_strategy() -> str:
    """Returns the name of the strategy that reads outcome weights."""
    return next(name for name, each in strategy_classes().items() if each.outcome)


def _evaluate_filter(
    snapshot: Snapshot, tree: dict[str, Any], param: str
) -> tuple[AllowedItems, list[str]]:
    """Returns the items that satisfy a filter, and texts about its values that no item has.

    Raises:
        InvalidRequest: If the filter is invalid; the error names the field.
    """
    try:
        return snapshot.allowed(tree), [str(absent) for absent in snapshot.absent_values(tree)]
    except FilterError as error:
        place = f"{param}.{error.param}" if error.param else param
        raise InvalidRequest(place, str(error)) from None
