"""The service: a bundle, its models, an engine and a history store, behind plain methods.

HTTP, the commands and batch jobs all answer through one of these, so that they answer alike.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from msgspec import structs

from recserve.bundle.bundle import EVENTS, Bundle
from recserve.core.request import QueueFull, Result
from recserve.engine.engine_config import EngineConfig
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.ranking.live_ranking import LiveRanking
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.metrics import Gauges
from recserve.schemas.events import EventsAnswer, EventsBody, HistoryAnswer
from recserve.schemas.items import (
    HiddenAnswer,
    ItemAnswer,
    ItemsAnswer,
    ItemsBody,
    RankAnswer,
    RankBatchBody,
    RankBody,
    RecommendAnswer,
    RecommendBody,
    RollbackAnswer,
    RollbackBody,
)
from recserve.service.catalog.live_items import LiveItems
from recserve.service.errors import ServiceClosed, UnknownModel
from recserve.service.history.histories import Rewritten
from recserve.service.loading import Device, DTypeName, Models
from recserve.service.opening import open_parts
from recserve.service.recommend.rank import Rankings
from recserve.service.recommend.recommend import POPULAR, Recommendations
from recserve.service.recommend.roots import RankerRoots, RecommenderRoots
from recserve.service.recommend.scorers import LikelihoodScorer, RankerScorer, Scorer
from recserve.service.recommend.shadow import Shadow
from recserve.service.recommend.warming import Warming
from recserve.service.runtime import Runtime
from recserve.service.text.text_loading import LoadedText
from recserve.service.work import Work, failed

log = logging.getLogger(__name__)

# Every name the contract knows, so that dashboards keep their series from build to build.
STRATEGIES = ("beam", "speculative", "nezha", "parallel", "dense", "specgr", POPULAR)
SCORERS = ("ranker", "likelihood")
MANY_IN_FLIGHT = 64


class Service:
    """Answers from one bundle, from any thread; the engine runs on its own."""

    def __init__(
        self, bundle: Bundle, runtime: Runtime, models: Models, journal: ItemJournal | None = None
    ) -> None:
        """journal: where changes of items are kept and replayed from; None: in memory only."""
        self.bundle = bundle
        self.runtime = runtime
        self._models = models
        self._recommendations: Recommendations | None = None
        self._rankings: Rankings | None = None
        self._closed = False
        scorers: dict[str, Scorer] = {}
        ranking: LiveRanking | None = None
        self._ranker_roots: RankerRoots | None = None
        self._recommender_roots: RecommenderRoots | None = None
        manifest = bundle.manifest
        if models.ranker is not None:
            catalog = runtime.snapshot.catalog
            tables = RankingTables.load(bundle.directory("ranker"), catalog.items, catalog.vectors)
            ranking = LiveRanking(tables)
            runtime.snapshot = replace(runtime.snapshot, ranking=tables)
            salt = int.from_bytes(hashlib.sha256(manifest.model_version.encode()).digest()[:8])
            self._ranker_roots = RankerRoots(tables, salt, runtime.device)
            if tables.settings.has_values:
                runtime.histories.default_value = tables.settings.mean_value
            scorers["ranker"] = RankerScorer(self._ranker_roots, models.ranker.config.tasks)
        if models.recommender is not None:
            roots = RecommenderRoots(models.recommender.config, runtime.device)
            self._recommender_roots = roots
            weight = float(manifest.recommender.get("dense_weight", 0.0))
            retriever = models.heads.retriever
            outcomes = () if retriever is None else retriever.config.outcomes
            self._recommendations = Recommendations(runtime, roots, weight, outcomes)
            scorers["likelihood"] = LikelihoodScorer(roots)
        if scorers:
            self._rankings = Rankings(runtime, scorers)
        usual = None if self._recommendations is None else self._recommendations.usual
        self._warming = Warming(runtime, self._recommender_roots, self._ranker_roots, usual)
        self._items = LiveItems(runtime, models, bundle, journal, ranking)
        self._items.replay()

    @staticmethod
    def open(
        bundle: Path | str,
        store: str | None = None,
        device: Device = "auto",
        *,
        signing_key: bytes | None = None,
        max_queue: int = 1024,
        journal: Path | None = None,
        dtype: DTypeName = "float32",
        kv_bytes: int = EngineConfig.kv_bytes,
        kv_dtype: Literal["fp8"] | None = None,
        load_aware: bool = False,
        graphs: bool | None = None,
        invariant: bool = False,
        text: LoadedText | None = None,
        warm_drafts: bool = True,
    ) -> Service:
        """Load everything.

        store: URL of the history store, None: `default_store`. An empty store is filled with the
        bundle's own events. signing_key: None draws one, whose tokens end with the process.
        journal: folder of item changes, None: beside the bundle. dtype: of the recommender;
        "auto" is the fastest on this machine.
        kv_dtype: of caches, None: the models'. text: a language model beside them. warm_drafts:
        whoever is warmed gets a draft too, where that pays.
        Raises BundleError, StoreUnavailable, JournalError, or ValueError for device or `invariant`.
        """
        opened = open_parts(
            Path(bundle),
            store,
            device,
            dtype,
            secrets.token_bytes(32) if signing_key is None else signing_key,
            EngineConfig(
                max_queue=max_queue,
                kv_bytes=kv_bytes,
                kv_dtype=kv_dtype,
                load_aware=load_aware,
                graphs=graphs,
                invariant=invariant,
            ),
            journal,
            text,
        )
        opened.runtime.warm_drafts = warm_drafts
        return Service(opened.bundle, opened.runtime, opened.models, opened.journal)

    def close(self) -> None:
        """Finish what the engine has, then close engine and store. May be called again."""
        if not self._closed:
            self._closed = True
            self._items.close()
            self.runtime.engine.close()
            self.runtime.histories.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return not self._closed and self.runtime.engine.alive

    @property
    def store_blocks(self) -> bool:
        """Whether reading a history may wait for a network."""
        return self.runtime.histories.blocks

    def begin_recommend(
        self, body: RecommendBody, request_id: str | None = None, deadline_s: float | None = None
    ) -> Work[RecommendAnswer]:
        """Start a recommendation. deadline_s: of time.monotonic().

        Raises InvalidRequest, UnknownModel, QueueFull or ServiceClosed.
        """
        self._check_open()
        if self._recommendations is None:
            raise UnknownModel("this bundle holds no recommender; train one first")
        return self._recommendations.begin(body, request_id or body.request_id, deadline_s)

    def begin_rank(
        self, body: RankBody, request_id: str | None = None, deadline_s: float | None = None
    ) -> Work[RankAnswer]:
        """Start a ranking, as `begin_recommend`."""
        self._check_open()
        if self._rankings is None:
            raise UnknownModel("this bundle holds no model that ranks; train one first")
        return self._rankings.begin(body, request_id or body.request_id, deadline_s)

    def begin_rank_batch(
        self,
        body: RankBatchBody,
        request_id: str | None = None,
        deadline_s: float | None = None,
    ) -> list[Work[RankAnswer]]:
        """Start the rankings of a batch, in order; a bad one answers with its error.

        Raises QueueFull, after cancelling the others, if not all find a place.
        """
        works: list[Work[RankAnswer]] = []
        for index, one in enumerate(body.requests):
            name = one.request_id or (f"{request_id}.{index}"[-128:] if request_id else None)
            try:
                works.append(self.begin_rank(one, name, deadline_s))
            except ValueError as error:
                works.append(failed(error))
            except Exception:
                for work in works:
                    if work.future is not None:
                        self.cancel(work.future)
                raise
        return works

    def recommend(self, body: RecommendBody) -> RecommendAnswer:
        """A slate, waited for."""
        return self.begin_recommend(body).wait()

    def rank(self, body: RankBody) -> RankAnswer:
        """A ranking, waited for."""
        return self.begin_rank(body).wait()

    def recommend_many(self, bodies: Sequence[RecommendBody]) -> list[RecommendAnswer | Exception]:
        """Slates in order, computed together; an exception stands where a body was refused."""
        answers: list[RecommendAnswer | Exception] = []
        works: deque[Work[RecommendAnswer]] = deque()
        for body in bodies:
            while len(works) >= MANY_IN_FLIGHT:
                answers.append(works.popleft().outcome())
            try:
                works.append(self._patiently(body))
            except ValueError as error:
                works.append(failed(error))
        return answers + [work.outcome() for work in works]

    def cancel(self, future: Future[Result]) -> None:
        """Nobody waits for this any more."""
        self.runtime.engine.cancel(future)

    def add_events(self, body: EventsBody) -> EventsAnswer:
        """Store events and corrections, drop roots of what is not so any more, and compute roots
        anew where asked. Raises StoreUnavailable.
        """
        self._check_open()
        added = self.runtime.histories.add(body, self.runtime.snapshot)
        self._warming.forget(added.rewritten)
        answer = added.answer
        if not body.warm:
            return answer
        refused = {rejection.index for rejection in answer.rejected}
        users = dict.fromkeys(e.user_id for i, e in enumerate(body.events) if i not in refused)
        return structs.replace(answer, warmed=self._warming.warm(users))

    def history(self, user_id: str) -> HistoryAnswer:
        """A user's stored events. Raises StoreUnavailable or CorruptHistory."""
        self._check_open()
        return self.runtime.histories.listed(user_id, self.runtime.snapshot)

    def delete_user(self, user_id: str) -> None:
        """Remove a user from the store and from the engine's cache. Raises StoreUnavailable."""
        self._check_open()
        runtime = self.runtime
        history = runtime.histories.delete(user_id, runtime.snapshot)
        if self._items.was_read_otherwise(history):
            runtime.engine.forget_all()
        self._warming.forget({user_id: Rewritten(history, None)})

    def item(self, item_id: str) -> ItemAnswer:
        """One item of the catalogue. Raises UnknownItem."""
        return self._items.get(item_id)

    def put_items(self, body: ItemsBody) -> ItemsAnswer:
        """Insert and update items. Raises JournalError."""
        self._check_open()
        return self._items.put(body)

    def hide_item(self, item_id: str) -> HiddenAnswer:
        """Take an item out of all answers. Raises UnknownItem or JournalError."""
        self._check_open()
        return HiddenAnswer(item_id=item_id, catalog_version=self._items.hide(item_id))

    def rollback_items(self, body: RollbackBody) -> RollbackAnswer:
        """Restore the items of an earlier version. Raises UnknownVersion or JournalError."""
        self._check_open()
        return self._items.rollback(body.catalog_version)

    def models(self) -> list[dict[str, Any]]:
        """The loaded models in OpenAI's form, with what is ours under `recserve`."""
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "recserve",
                "recserve": {**self.versions(), **said},
            }
            for name, said in self._models.described(self.runtime.engine.strategies).items()
        ]

    def versions(self) -> dict[str, str]:
        """Versions of what is served."""
        return {
            "model_version": self.runtime.model_version,
            "catalog_version": self.runtime.snapshot.items.name,
        }

    def samples(self, num_users: int, num_items: int) -> dict[str, list[str]]:
        """Some users and popular items to try things with."""
        snapshot = self.runtime.snapshot
        nothing = np.zeros(0, np.int64)
        popular = snapshot.most_popular(num_items, nothing, None)
        items = [snapshot.items.item_id(row) for row in popular.tolist()]
        users: list[str] = []
        if EVENTS in self.bundle.manifest.files:
            column = pq.read_table(self.bundle.path(EVENTS), columns=["user_id"]).column(0)
            users = column.unique().slice(0, num_users).to_pylist()
        return {"users": users, "items": items}

    def gauges(self) -> Gauges:
        """The engine's figures for Prometheus."""
        return self.runtime.gauges()

    def compare_with(self, strategy: str, share: float) -> None:
        """Ask `strategy` again what was answered, on a share of the requests. Raises ValueError."""
        self.runtime.shadow = Shadow(self.runtime.engine, strategy, share)

    def _patiently(self, body: RecommendBody) -> Work[RecommendAnswer]:
        """As `begin_recommend`, waiting for a place where the queue is full."""
        while True:
            try:
                return self.begin_recommend(body)
            except QueueFull as error:
                time.sleep(error.retry_after_s)

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceClosed("the service is closed")
