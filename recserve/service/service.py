"""The service: models, an engine and a history store behind plain methods.

HTTP, the command line and batch jobs all call a `Service`, so that their answers agree. It has five
parts. A route is one method of one part: it takes a checked message and returns the answer, or a
`Pending` answer of the engine. The methods of `Service` itself are for Python: they check plain
fields, call the same method and wait.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version as installed
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow.parquet as pq
import torch

from recserve.bundle.bundle import EVENTS, Bundle
from recserve.core.client import LOCAL, Client
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.stats import EngineStats
from recserve.features.catalog.catalog_log import CatalogLog, SharedLog
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.catalog.popularity import Popularity
from recserve.features.history.history import HistoryStore, StoreOptions
from recserve.features.history.stores import open_store, split_ttl
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.state_files import counts_file, default_journal, default_store
from recserve.kernels.native.processor import instruction_set
from recserve.metrics import Gauges
from recserve.schemas.browse import ItemPage, ItemsQuery
from recserve.schemas.events import (
    EventsRequest,
    EventsResponse,
    EventTypesResponse,
    HistoryResponse,
)
from recserve.schemas.items import (
    HideItemResponse,
    ItemResponse,
    ItemsRequest,
    ItemsResponse,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
    RollbackRequest,
    RollbackResponse,
    SimilarRequest,
)
from recserve.schemas.shorthand import AnyId, check_body, check_id
from recserve.service.attribution import Envelope, Signer
from recserve.service.auto_strategy import read_auto
from recserve.service.effects import Effects
from recserve.service.errors import ServiceClosed, UnknownModel
from recserve.service.event_types import EventTypes
from recserve.service.histories import Histories
from recserve.service.live_catalog import LiveCatalog
from recserve.service.model_loader import (
    Device,
    item_index,
    load_item_graph,
    load_models,
    model_fields,
    resolve_device,
)
from recserve.service.options import FILE, REDIS, CatalogLogOptions, ServiceOptions
from recserve.service.pending import earlier_deadline
from recserve.service.prefixes import RankerPrefixBuilder, RecommenderPrefixBuilder
from recserve.service.prewarm import Prewarm
from recserve.service.rank import ItemScorer, LikelihoodScorer, RankerScorer, RankService
from recserve.service.recommend import RecommendService
from recserve.service.shown import ShownItems
from recserve.service.similar import ItemSimilarity
from recserve.service.snapshot import POPULAR, Snapshot
from recserve.service.text.completions import TextService
from recserve.service.text.loader import LoadedText
from recserve.service.text.model import TextModel

# Name of the scorer that each model implements.
SCORER_OF = {"ranker": "ranker", "recommender": "likelihood"}
Fields = Mapping[str, Any]
if TYPE_CHECKING:
    from recserve.service.shared_popularity import SharedPopularity


class Service:
    """Answers requests of a bundle, of a language model, or of both, from any thread.

    The parts `catalog`, `histories`, `recommender`, `ranker` and `text` raise UnknownModel if the
    bundle or the server lacks them, and ServiceClosed after `close`.

    Attributes:
        engine: Runs the requests of all models on its own thread.
        device: Device of the models.
        effects: What slates, events and deletions change beside their answers.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        *,
        text: TextModel | None = None,
        bundle: Bundle | None = None,
        networks: EngineModels | None = None,
        catalog: LiveCatalog | None = None,
        histories: Histories | None = None,
        recommender: RecommendService | None = None,
        ranker: RankService | None = None,
        signer: Signer | None = None,
        effects: Effects = Effects(),  # noqa: B008 (it is frozen)
    ) -> None:
        """Joins parts that are open; `Service.open` and `Service.of_text` open them.

        Args:
            engine: An engine of the models.
            device: Device of the models.
            text: The language model; None without one.
            bundle: The bundle; None without one. Then all following are None.
            networks: Its networks.
            catalog: Its live catalogue.
            histories: The stored events of users.
            recommender: Answers recommend requests; None without a bundle.
            ranker: Answers rank requests; None if no model of the bundle can rank.
            signer: Signs attribution tokens.
            effects: What slates, events and deletions change beside their answers.
        """
        self.engine = engine
        self.device = device
        self._bundle, self._networks = bundle, networks or EngineModels()
        self._catalog, self._histories, self._signer = catalog, histories, signer
        self._recommender, self._ranker = recommender, ranker
        self._shown_from_answers = histories is not None and histories.shown.from_answers
        self.set_effects(effects)
        self._text: TextService | None = None
        if text is not None:
            context = min(text.context, engine.token_capacity("text"))
            self._text = TextService(engine, replace(text, context=context))
        self._closed = False

    @staticmethod
    def open(
        bundle: Path | str | Bundle,
        store: str | None = None,
        device: Device = "auto",
        options: ServiceOptions | None = None,
        replaced: Service | None = None,
    ) -> Service:
        """Opens a bundle and starts its engine, unless the service will replace another one.

        Args:
            bundle: Folder of the bundle, or the bundle. It is compared with its hashes unless that
                has been done.
            store: URL of the history store; None means an LMDB folder next to the bundle. An empty
                store is filled with the bundle's own events.
            device: Device of the models.
            options: The other options; None means the defaults.
            replaced: Service that this one will replace. Its store and signing key are shared, and
                the store gets the bundle's events of new users only. The caller starts the engine.

        Raises:
            BundleError: If a file differs from its hash, or changes until it is loaded.
            StoreUnavailable: If the history store does not answer.
            JournalError: If the journal of item changes cannot be read.
            ValueError: If the device or an option does not fit this machine.
        """
        options = options or ServiceOptions()
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        if not bundle.verified:
            bundle.verify()
        url = default_store(bundle.root) if store is None else store
        journal = default_journal(bundle.root) if options.journal is None else options.journal
        place, starts = resolve_device(device), replaced is None
        networks, snapshot = _load_networks(bundle, place, options)
        tables = snapshot.ranking
        with ExitStack() as opened:  # closes what is open if a later stage fails
            history_store = _open_store(url, options, replaced)
            if starts:
                opened.callback(history_store.close)
            engine = _build_engine(networks, options)
            opened.callback(engine.close)
            engine.capture(snapshot.trie)
            if starts:
                engine.start()
            bundle.check_unchanged()  # before names are written to the store
            types = _add_event_types(history_store, bundle, tables, options)
            catalog = LiveCatalog(
                bundle,
                networks,
                engine,
                snapshot,
                _open_log(bundle, options, url, journal, replaced),
                options.catalog_log.stale_ms / 1e3,
            )
            opened.callback(catalog.close)
            item_prefixes = ranker_prefixes = None
            if networks.recommender is not None:
                item_prefixes = RecommenderPrefixBuilder(networks.recommender, place)
            if tables is not None:
                seed = _make_seed(bundle.manifest.model_version)
                ranker_prefixes = RankerPrefixBuilder(tables, types, seed, place)
            histories = Histories(
                history_store,
                types,
                engine,
                catalog,
                Prewarm(engine, item_prefixes, ranker_prefixes),
                (
                    ShownItems(history_store, options.shown_from_answers)
                    if replaced is None
                    else replaced.histories.shown
                ),
                default_value=(
                    tables.settings.mean_value if tables and tables.settings.has_values else 1.0
                ),
                owns_store=starts,
            )
            signer = _signer(options, replaced)
            shared = engine, catalog, histories, Envelope(signer, bundle.manifest.model_version)
            retriever = networks.heads.retriever
            recommender = RecommendService(
                *shared,
                item_prefixes,
                dense_weight=bundle.manifest.dense_weight,
                outcomes=() if retriever is None else retriever.config.outcomes,
                auto=read_auto(bundle.manifest.recommender),
                similarity=ItemSimilarity.open(bundle, snapshot.catalog.vectors),
                negative_weight=bundle.manifest.negative_weight,
            )
            ranker = None
            if scorers := _make_scorers(networks, item_prefixes, ranker_prefixes):
                ranker = RankService(*shared, scorers)
            service = Service(
                engine,
                place,
                text=None if options.text is None else options.text.model,
                bundle=bundle,
                networks=networks,
                catalog=catalog,
                histories=histories,
                recommender=recommender,
                ranker=ranker,
                signer=signer,
                effects=options.effects,
            )
            catalog.open_tools()
            bundle.check_unchanged()  # before the journal and the store are written
            catalog.replay()
            if options.catalog_log.place != FILE:
                catalog.shared_counts = _open_popularity(bundle, options, url, catalog, replaced)
                catalog.shared_counts.start()
            elif starts:  # otherwise the counts come with `hand_over`
                catalog.load_counts(counts_file(url, journal))
            histories.import_events(bundle, only_new_users=not starts)
            opened.pop_all()
        return service

    @staticmethod
    def of_text(text: LoadedText, config: EngineConfig | None = None) -> Service:
        """Returns a service that has only a language model, with a running engine."""
        engine = build_engine(EngineModels(text=text.network, drafters=text.drafters), config)
        engine.start()
        return Service(engine, text.model.device, text=text.model)

    def close(self) -> None:
        """Finishes the engine's requests, then closes journal, engine and store.

        May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        if self._catalog is not None:
            self._catalog.close()
        self.engine.close()
        if self._histories is not None:
            self._histories.close()
        # A reference to this service must not keep its successors in memory.
        if self._catalog is not None and self._histories is not None:
            self._catalog.successor = self._histories.successor = None

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Service cannot be pickled, because it has threads and open files; open the bundle "
            "in each process, or use recserve.batch.slates"
        )

    @property
    def alive(self) -> bool:
        """True while the service answers requests."""
        return not self._closed and self.engine.alive

    @property
    def bundle(self) -> Bundle:
        """The open bundle. Raises UnknownModel without one."""
        if self._bundle is None:
            raise UnknownModel("this server has a language model only; start it with --bundle")
        return self._bundle

    @property
    def signer(self) -> Signer:
        """Signs attribution tokens. Raises UnknownModel without a bundle."""
        _ = self.bundle
        assert self._signer is not None
        return self._signer

    @property
    def catalog(self) -> LiveCatalog:
        """The live catalogue."""
        _ = self.bundle
        self._check_open()
        assert self._catalog is not None
        return self._catalog

    @property
    def histories(self) -> Histories:
        """The stored events of users."""
        _ = self.bundle
        self._check_open()
        assert self._histories is not None
        return self._histories

    @property
    def recommender(self) -> RecommendService:
        """Answers recommend requests."""
        _ = self.bundle
        self._check_open()
        assert self._recommender is not None
        return self._recommender

    @property
    def ranker(self) -> RankService:
        """Answers rank requests."""
        _ = self.bundle
        self._check_open()
        if self._ranker is None:
            raise UnknownModel(
                "this bundle holds no ranking model; "
                "train one with recserve train ranker --bundle BUNDLE"
            )
        return self._ranker

    @property
    def text(self) -> TextService:
        """Completions, chats, text scores and embeddings."""
        if self._text is None:
            raise UnknownModel("this server has no language model; start it with --llm")
        return self._text

    def recommend(self, body: RecommendRequest | Fields) -> RecommendResponse:
        """Returns a slate. The body is an object or its fields.

        Raises:
            InvalidRequest: If the body does not match the catalogue or the models.
            UnknownModel: If the bundle has no recommender.
            QueueFull: If the queue of the engine is full.
            ServiceClosed: If the service is closed.
        """
        checked = check_body(body, RecommendRequest)
        deadline_s = earlier_deadline(checked.timeout_ms)
        answer = self.recommender.begin(checked, deadline_s=deadline_s).wait()
        return self.show(checked, answer)

    def similar(self, body: SimilarRequest | Fields) -> RecommendResponse:
        """Returns the items that are most similar to given ones. Raises as `recommend`."""
        return self.recommend(check_body(body, SimilarRequest).as_recommend())

    def rank(self, body: RankRequest | Fields) -> RankResponse:
        """Returns a ranking. The body is an object or its fields. Raises as `recommend`."""
        checked = check_body(body, RankRequest)
        return self.ranker.begin(checked, deadline_s=earlier_deadline(checked.timeout_ms)).wait()

    def add_events(self, body: EventsRequest | Fields) -> EventsResponse:
        """Stores events and corrections. Raises StoreUnavailable or InvalidRequest."""
        return self.store_events(check_body(body, EventsRequest))

    def event_types(self) -> EventTypesResponse:
        """Returns the names of the event types that events may have. Raises UnknownModel."""
        return self.histories.list_types()

    def history(self, user_id: AnyId) -> HistoryResponse:
        """Returns a user's stored events.

        Raises StoreUnavailable, CorruptHistory or InvalidRequest.
        """
        return self.histories.list_events(check_id("user_id", user_id))

    def delete_user(self, user_id: AnyId) -> None:
        """Removes a user from the history store, the caches and the logs.

        Raises StoreUnavailable, InvalidRequest, or OSError if a row of a log may be left.
        """
        self.forget_user(check_id("user_id", user_id))

    def set_effects(self, effects: Effects) -> None:
        """Sets what slates, events and deletions change, before the first request."""
        self.effects = effects
        if self._recommender is not None:
            self._recommender.log_probs = effects.slate_log is not None
        if self._histories is not None:
            self._histories.event_log = effects.event_log

    def show(
        self, body: RecommendRequest, answer: RecommendResponse, tracked: bool = True
    ) -> RecommendResponse:
        """Returns the slate that a user sees; see `Effects.show`. It records what was shown."""
        if (body.shown_ids or self._shown_from_answers) and tracked and body.user is not None:
            assert self._histories is not None
            items = body.shown_ids or [item.item_id for item in answer.items]
            self._histories.shown.add(body.user.id, items, answer.request_id)
        return self.effects.show(body.user, answer, self.signer, tracked)

    def store_events(
        self, body: EventsRequest, tracked: bool = True, client: Client = LOCAL
    ) -> EventsResponse:
        """Stores checked events of a client, with their effects.

        Args:
            body: The events.
            tracked: Whether they are of users.
            client: Who sends them.
        """
        stored = self.histories.add(body, tracked, client)
        return self.effects.attribute(body, stored, self.signer, tracked)

    def forget_user(self, user_id: str) -> None:
        """Removes a user whose id is checked. Raises as `delete_user`."""
        self.histories.delete(user_id)
        self.effects.forget(user_id, self.signer)

    def item(self, item_id: AnyId) -> ItemResponse:
        """Returns one item of the catalogue. Raises UnknownItem."""
        return self.catalog.get(check_id("item_id", item_id))

    def items(self, query: ItemsQuery | Fields) -> ItemPage:
        """Returns a page of the catalogue, or the items of `ids`. Raises InvalidRequest."""
        return self.catalog.page(check_body(query, ItemsQuery))

    def put_items(self, body: ItemsRequest | Fields) -> ItemsResponse:
        """Inserts and updates items. Raises JournalError or InvalidRequest."""
        return self.catalog.put(check_body(body, ItemsRequest))

    def hide_item(self, item_id: AnyId) -> HideItemResponse:
        """Removes an item from all answers. Raises UnknownItem or JournalError."""
        return self.catalog.hide_item(check_id("item_id", item_id))

    def rollback_items(self, body: RollbackRequest | Fields) -> RollbackResponse:
        """Restores the items of an earlier version.

        Raises UnknownVersion, JournalError or InvalidRequest.
        """
        return self.catalog.rollback(check_body(body, RollbackRequest))

    def models(self) -> list[dict[str, Any]]:
        """Returns the models in OpenAI's format; the key `recserve` holds our own fields."""
        scorers = () if self._ranker is None else self._ranker.scorers
        listed = list[dict[str, Any]]()
        facts = {}
        if self._bundle is not None:
            facts = model_fields(self._networks, self.engine.selectable)
        for name, fields in facts.items():
            scorer = SCORER_OF[name]
            own = {"scorer": scorer} if scorer in scorers else {}
            said = {**self.versions(), **fields, **own}
            listed.append(
                {"id": name, "object": "model", "created": 0, "owned_by": "recserve"}
                | {"recserve": said}
            )
        listed += [] if self._text is None else self._text.model.list_entries()
        version = installed("recserve")
        return [one | {"recserve": {"version": version, **one["recserve"]}} for one in listed]

    def model(self, name: str) -> dict[str, Any]:
        """Returns one model of `models`. Raises UnknownModel."""
        models = self.models()
        for model in models:
            if model["id"] == name:
                return model
        there = ", ".join(repr(model["id"]) for model in models)
        raise UnknownModel(f"this server has the models {there}, got {name[:80]!r}")

    def check_scoring(self, text: str | None) -> bool:
        """Returns whether slates say how they were scored, if requests name this scoring.

        Args:
            text: A scoring, as JSON. None: that of the model.

        Raises:
            InvalidRequest: If the recommender cannot be scored that way.
        """
        return self._recommender is not None and self._recommender.check_scoring(text)

    def versions(self) -> dict[str, str]:
        """Returns the versions of models and catalogue; empty without a bundle."""
        if self._bundle is None or self._catalog is None:
            return {}
        return {
            "model_version": self._bundle.manifest.model_version,
            "catalog_version": self._catalog.current.items.name,
        }

    def samples(self, num_users: int, num_items: int) -> dict[str, list[str]]:
        """Returns ids of some users and of the most popular items; empty without a bundle."""
        if self._bundle is None or self._catalog is None:
            return {"users": [], "items": []}
        snapshot = self._catalog.current
        popular = snapshot.list_allowed(POPULAR, num_items, np.zeros(0, np.int64), None)
        items = [snapshot.items.item_id(row) for row in popular.tolist()]
        users: list[str] = []
        if EVENTS in self._bundle.manifest.files:
            column = pq.read_table(self._bundle.path(EVENTS), columns=["user_id"]).column(0)
            users = column.unique().slice(0, num_users).to_pylist()
        return {"users": users, "items": items}

    def gauges(self) -> Gauges:
        """Returns the metrics of the engine for Prometheus; none of an engine without models."""
        if not self.engine.schedulers:
            return Gauges()
        illegal = 0 if self._recommender is None else self._recommender.illegal_items
        context = 0 if self._text is None else self._text.model.context
        gauges = gauges_of(self.engine.stats(), illegal, context)
        follower = None if self._catalog is None else self._catalog.follower
        return gauges if follower is None else replace(gauges, catalog_log=follower.counts())

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceClosed("the service is closed")


def _load_networks(
    bundle: Bundle, device: torch.device, options: ServiceOptions
) -> tuple[EngineModels, Snapshot]:
    """Loads the networks of a bundle, and its catalogue with all that they need of it."""
    contents = bundle.catalog()
    popularity = Popularity(contents.popularity, options.popular_half_life_s)
    snapshot = Snapshot.of(contents, device, popularity, bundle.shadows(contents))
    networks = load_models(bundle, snapshot, device, options.dtype, options.weights)
    tables = None
    if networks.ranker is not None:
        items, vectors = snapshot.catalog.items, snapshot.catalog.vectors
        tables = RankingTables.load(bundle.directory("ranker"), items, vectors)
    return networks, replace(
        snapshot,
        graph=load_item_graph(bundle, device),
        index=item_index(networks.recommender, networks.heads, options.index_device),
        ranking=tables,
    )


def _build_engine(networks: EngineModels, options: ServiceOptions) -> Engine:
    """Builds the engine of a bundle's networks, and of the language model beside it."""
    if (text := options.text) is not None:
        networks = replace(networks, text=text.network, drafters=text.drafters)
    return build_engine(networks, options.engine)


def _add_event_types(
    store: HistoryStore, bundle: Bundle, tables: RankingTables | None, options: ServiceOptions
) -> EventTypes:
    """Opens the names of event types in the store, and adds those of options and bundle."""
    kinds = options.event_kinds.over(bundle.manifest.event_kinds)
    weights = bundle.manifest.event_weights
    types = EventTypes(store, kinds, weights)
    types.add((*options.event_types, *kinds.named, *weights.named))
    trained = () if tables is None else tables.settings.type_names
    types.add((*bundle.manifest.type_names, *trained))
    return types


def _make_seed(model_version: str) -> int:
    """Returns the seed of the ranker's prefixes, one for each version of the models."""
    return int.from_bytes(hashlib.sha256(model_version.encode()).digest()[:8])


def _make_scorers(
    networks: EngineModels,
    items: RecommenderPrefixBuilder | None,
    ranker: RankerPrefixBuilder | None,
) -> dict[str, ItemScorer]:
    """Returns the scorers of a bundle by name. `auto` is the first one."""
    scorers: dict[str, ItemScorer] = {}
    if ranker is not None and networks.ranker is not None:
        scorers["ranker"] = RankerScorer(ranker, networks.ranker.config.tasks)
    if items is not None:
        scorers["likelihood"] = LikelihoodScorer(items)
    return scorers


def _open_store(url: str, options: ServiceOptions, replaced: Service | None) -> HistoryStore:
    """Opens the history store, or returns that of the replaced service."""
    if replaced is not None:
        return replaced.histories.store
    limit_ms = options.history_timeout_ms
    kept = StoreOptions(
        ttl_s=options.history_ttl_s, read_timeout_s=None if limit_ms is None else limit_ms / 1e3
    )
    return open_store(url, kept)


def _open_journal(bundle: Bundle, folder: Path, replaced: Service | None) -> ItemJournal | None:
    """Returns the journal of item changes.

    It is None if the replaced service may still write to the same file. That service hands the
    file over with its content.
    """
    journal = ItemJournal(folder / f"{bundle.manifest.catalog_version}.jsonl")
    used = None if replaced is None else replaced.catalog.journal
    shared = isinstance(used, ItemJournal) and used.path.resolve() == journal.path.resolve()
    return None if shared else journal


def _open_log(
    bundle: Bundle, options: ServiceOptions, store: str, journal: Path, replaced: Service | None
) -> CatalogLog | None:
    """Returns the log of item changes, as in `_open_journal` if it is a file.

    Raises:
        ValueError: If the place of a shared log is no URL of Redis.
        JournalError: If Redis does not answer.
    """
    wanted = options.catalog_log
    if wanted.place == FILE:
        return _open_journal(bundle, journal, replaced)
    # Only servers that share their items need the package redis.
    from recserve.features.catalog.redis_log import open_log

    url = _redis_of(wanted, store, replaced)
    try:
        return open_log(url, bundle.catalog(), wanted.name, wanted.wait_replicas)
    except ValueError as error:
        raise ValueError(f"catalog_log: {error}") from None


def _redis_of(wanted: CatalogLogOptions, store: str, replaced: Service | None) -> str:
    """Returns the URL of the Redis that has a shared log."""
    used = None if replaced is None else replaced.catalog.journal
    if wanted.place == REDIS and used is not None and used.shared:
        return cast(SharedLog, used).url  # the store of the replaced service is not opened again
    return split_ttl(store)[0] if wanted.place == REDIS else wanted.place


def _open_popularity(
    bundle: Bundle,
    options: ServiceOptions,
    store: str,
    catalog: LiveCatalog,
    replaced: Service | None,
) -> SharedPopularity:
    """Returns what counts events together with the servers that share the items."""
    # Only servers that share their items need the package redis.
    from recserve.features.catalog.redis_popularity import open_popularity
    from recserve.service.shared_popularity import SharedPopularity

    shared = open_popularity(
        _redis_of(options.catalog_log, store, replaced),
        options.catalog_log.name,
        options.popular_half_life_s,
        bundle.manifest.catalog_version,
    )
    return SharedPopularity(shared, catalog.current.popularity, lambda: catalog.current.items)


def _signer(options: ServiceOptions, replaced: Service | None) -> Signer:
    if replaced is not None:
        return replaced.signer
    return Signer(secrets.token_bytes(32) if options.signing_key is None else options.signing_key)


def build_info(device: str) -> dict[str, str]:
    """Returns the labels of `recserve_build_info` for models on a type of device."""
    return {
        "version": installed("recserve"),
        "torch": torch.__version__,
        "device": device,
        "isa": instruction_set() or "generic",
    }


def gauges_of(stats: EngineStats, illegal_items: int = 0, context: int = 0) -> Gauges:
    """Returns an engine's statistics as Prometheus metrics."""
    used = stats.pages_total - stats.pages_free - stats.pages_cached
    return Gauges.of(
        stats,
        illegal_items=illegal_items,
        context=context,
        kv_pages={"free": stats.pages_free, "cached": stats.pages_cached, "used": max(used, 0)},
        prefix_tokens={"hit": stats.prefix_hit_tokens, "miss": stats.prefix_missed_tokens},
        build=build_info(stats.device),
    )
