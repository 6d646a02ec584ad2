"""The service: models, an engine and a history store behind plain methods.

HTTP, the command line and batch jobs all call a `Service`, so that their answers agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recserve.bundle.bundle import Bundle
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.metrics import Gauges
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
    RankBatchRequest,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
    RollbackRequest,
    RollbackResponse,
)
from recserve.schemas.shorthand import AnyId, checked, checked_id
from recserve.service.catalog.live_items import LiveItems
from recserve.service.errors import ServiceClosed, UnknownModel
from recserve.service.histories import Histories
from recserve.service.model_loader import Device
from recserve.service.options import ServiceOptions
from recserve.service.parts import ItemParts, open_parts
from recserve.service.pending import Pending, Prepared, begin_all
from recserve.service.recommend.rank import Rankings
from recserve.service.recommend.recommend import Recommendations
from recserve.service.runtime import Runtime, gauges_of
from recserve.service.text.completions import Texts
from recserve.service.text.loader import LoadedText
from recserve.service.text.model import TextModel

SCORERS = ("ranker", "likelihood")
Fields = Mapping[str, Any]


class Service:
    """Answers requests of a bundle, of a language model, or of both, from any thread.

    Attributes:
        engine: Runs the requests of all models on its own thread.
        item_parts: Parts that serve the bundle; None without a bundle.
    """

    def __init__(
        self, engine: Engine, item_parts: ItemParts | None = None, text: TextModel | None = None
    ) -> None:
        """Assembles a service; `Service.open` is the usual entry point.

        Args:
            engine: A running engine of the models.
            item_parts: Parts that serve the bundle; None without a bundle.
            text: The language model; None without one.
        """
        self.engine = engine
        self.item_parts = item_parts
        self._texts: Texts | None = None
        if text is not None:
            context = min(text.context, engine.token_capacity("text"))
            self._texts = Texts(engine, replace(text, context=context))
        self._closed = False

    @staticmethod
    def open(
        bundle: Path | str,
        store: str | None = None,
        device: Device = "auto",
        options: ServiceOptions | None = None,
    ) -> Service:
        """Opens a bundle and starts its engine.

        Args:
            bundle: Folder of the bundle.
            store: URL of the history store; None means an LMDB folder next to the bundle. An empty
                store is filled with the bundle's own events.
            device: Device of the models.
            options: The other options; None means the defaults.

        Raises:
            BundleError: If the bundle is damaged.
            StoreUnavailable: If the history store does not answer.
            JournalError: If the journal of item changes cannot be read.
            ValueError: If the device or an option does not fit this machine.
        """
        options = options or ServiceOptions()
        parts = open_parts(Bundle.open(bundle), store, device, options)
        text = None if options.text is None else options.text.model
        return Service(parts.runtime.engine, parts, text)

    @staticmethod
    def of_text(text: LoadedText, config: EngineConfig | None = None) -> Service:
        """Returns a service that has only a language model, with a running engine."""
        network, drafters = text.parts
        engine = build_engine(EngineModels(text=network, drafters=drafters), config)
        engine.start()
        return Service(engine, None, text.model)

    def close(self) -> None:
        """Finishes the engine's requests, then closes engine and store. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self.item_parts is not None:
            self.item_parts.close()
        else:
            self.engine.close()

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
        return self._parts.bundle

    @property
    def runtime(self) -> Runtime:
        """State that all item requests share. Raises UnknownModel without a bundle."""
        return self._parts.runtime

    @property
    def store_blocks(self) -> bool:
        """True if reading a history may wait for a network."""
        return self.runtime.histories.store.blocks

    @property
    def recommendations(self) -> Recommendations:
        """Answers recommend requests. Raises UnknownModel or ServiceClosed."""
        found = self._open_parts.recommendations
        if found is None:
            raise UnknownModel("this bundle holds no recommender; train one first")
        return found

    @property
    def rankings(self) -> Rankings:
        """Answers rank requests. Raises UnknownModel or ServiceClosed."""
        found = self._open_parts.rankings
        if found is None:
            raise UnknownModel("this bundle holds no ranking model; train one first")
        return found

    @property
    def items(self) -> LiveItems:
        """The live catalogue. Raises UnknownModel or ServiceClosed."""
        return self._open_parts.items

    @property
    def histories(self) -> Histories:
        """The stored events of users. Raises UnknownModel or ServiceClosed."""
        return self._open_parts.runtime.histories

    @property
    def texts(self) -> Texts:
        """Completions, chats and text scores. Raises UnknownModel."""
        if self._texts is None:
            raise UnknownModel("this server has no language model; start it with --llm")
        return self._texts

    def begin_recommend(
        self, body: RecommendRequest, request_id: str | None = None, deadline_s: float | None = None
    ) -> Pending[RecommendResponse]:
        """Starts a recommendation.

        Args:
            body: The request.
            request_id: Identifies the request; None means the body's own id, or a random one.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.

        Raises:
            InvalidRequest: If the body does not match the catalogue or the models.
            UnknownModel: If the bundle has no recommender.
            QueueFull: If the queue of the engine is full.
            ServiceClosed: If the service is closed.
        """
        return self.recommendations.begin(body, request_id or body.request_id, deadline_s)

    def begin_rank(
        self, body: RankRequest, request_id: str | None = None, deadline_s: float | None = None
    ) -> Pending[RankResponse]:
        """Starts a ranking; arguments and errors are those of `begin_recommend`."""
        return self.rankings.begin(body, request_id or body.request_id, deadline_s)

    def begin_recommend_batch(
        self, bodies: Sequence[RecommendRequest], request_id: str, deadline_s: float | None = None
    ) -> list[Pending[RecommendResponse]]:
        """Starts several recommendations, all or none.

        Args:
            bodies: The requests.
            request_id: Identifies the request; each recommendation adds its number.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.

        Raises:
            Exception: As in `begin_recommend`, for any of the requests.
        """
        prepare = self.recommendations.prepare
        return begin_all(
            self.engine,
            [
                prepare(body, f"{request_id}.{index}"[-128:], deadline_s)
                for index, body in enumerate(bodies)
            ],
        )

    def begin_rank_batch(
        self,
        body: RankBatchRequest,
        request_id: str | None = None,
        deadline_s: float | None = None,
    ) -> list[Pending[RankResponse]]:
        """Starts the rankings of a batch, in order.

        Returns:
            One pending answer per ranking. An invalid request yields its error as the answer.

        Raises:
            QueueFull: If the queue cannot hold the whole batch now; none of it is started.
            TooManyQueries: If the queue can never hold the whole batch.
        """
        rankings = self.rankings
        answers: list[Prepared[RankResponse] | Exception] = []
        for index, one in enumerate(body.requests):
            name = one.request_id or (f"{request_id}.{index}"[-128:] if request_id else None)
            try:
                prepared = rankings.prepare(one, name, deadline_s)
                if prepared.query is not None:
                    self.engine.check(prepared.query)
                answers.append(prepared)
            except ValueError as error:
                answers.append(error)
        return begin_all(self.engine, answers)

    def recommend(self, body: RecommendRequest | Fields) -> RecommendResponse:
        """Returns a slate. The body is an object or its fields. Raises as `begin_recommend`."""
        return self.begin_recommend(checked(body, RecommendRequest)).wait()

    def rank(self, body: RankRequest | Fields) -> RankResponse:
        """Returns a ranking. The body is an object or its fields. Raises as `begin_rank`."""
        return self.begin_rank(checked(body, RankRequest)).wait()

    def add_events(self, body: EventsRequest | Fields) -> EventsResponse:
        """Stores events and corrections. Raises StoreUnavailable or InvalidRequest."""
        return self.histories.add(checked(body, EventsRequest))

    def event_types(self) -> EventTypesResponse:
        """Returns the names of the event types that events may have. Raises UnknownModel."""
        return EventTypesResponse(event_types=list(self.runtime.histories.types.known))

    def history(self, user_id: AnyId) -> HistoryResponse:
        """Returns a user's stored events.

        Raises StoreUnavailable, CorruptHistory or InvalidRequest.
        """
        return self.histories.list_events(checked_id("user_id", user_id))

    def delete_user(self, user_id: AnyId) -> None:
        """Removes a user from the history store and from the caches.

        Raises StoreUnavailable or InvalidRequest.
        """
        self.histories.delete(checked_id("user_id", user_id))

    def item(self, item_id: AnyId) -> ItemResponse:
        """Returns one item of the catalogue. Raises UnknownItem."""
        return self.items.get(checked_id("item_id", item_id))

    def put_items(self, body: ItemsRequest | Fields) -> ItemsResponse:
        """Inserts and updates items. Raises JournalError or InvalidRequest."""
        return self.items.put(checked(body, ItemsRequest))

    def hide_item(self, item_id: AnyId) -> HideItemResponse:
        """Removes an item from all answers. Raises UnknownItem or JournalError."""
        item = checked_id("item_id", item_id)
        return HideItemResponse(item_id=item, catalog_version=self.items.hide(item))

    def rollback_items(self, body: RollbackRequest) -> RollbackResponse:
        """Restores the items of an earlier version. Raises UnknownVersion or JournalError."""
        return self.items.rollback(body.catalog_version)

    def models(self) -> list[dict[str, Any]]:
        """Returns the models in OpenAI's format; the key `recserve` holds our own fields."""
        listed = [] if self.item_parts is None else self.item_parts.described()
        return listed if self._texts is None else [*listed, *self._texts.described()]

    def model(self, name: str) -> dict[str, Any]:
        """Returns one model of `models()`. Raises UnknownModel."""
        models = self.models()
        for model in models:
            if model["id"] == name:
                return model
        there = ", ".join(repr(model["id"]) for model in models)
        raise UnknownModel(f"this server has the models {there}, got {name[:80]!r}")

    def versions(self) -> dict[str, str]:
        """Returns the versions of models and catalogue; empty without a bundle."""
        return {} if self.item_parts is None else self.runtime.versions()

    def samples(self, num_users: int, num_items: int) -> dict[str, list[str]]:
        """Returns ids of some users and of the most popular items; empty without a bundle."""
        if self.item_parts is None:
            return {"users": [], "items": []}
        return self.item_parts.samples(num_users, num_items)

    def gauges(self) -> Gauges:
        """Returns the metrics of the engine for Prometheus."""
        return gauges_of(self.engine.stats()) if self.item_parts is None else self.runtime.gauges()

    @property
    def _parts(self) -> ItemParts:
        if self.item_parts is None:
            raise UnknownModel("this server has a language model only; start it with --bundle")
        return self.item_parts

    @property
    def _open_parts(self) -> ItemParts:
        if self._closed:
            raise ServiceClosed("the service is closed")
        return self._parts
