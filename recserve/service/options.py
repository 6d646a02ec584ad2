"""Options of `Service.open`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recserve.engine.engine_config import EngineConfig
from recserve.features.catalog.popularity import HALF_LIFE_S
from recserve.features.history.event_kinds import EventKinds
from recserve.service.effects import Effects
from recserve.service.model_loader import Device, DTypeName
from recserve.service.text.loader import LoadedText

FILE, REDIS = "file", "redis"


@dataclass(frozen=True)
class CatalogLogOptions:
    """Where changes of items are stored, and what follows if other servers store some there too.

    Attributes:
        place: `file`, the journal of one process; `redis`, the Redis of the history store; or the
            URL of a Redis.
        name: Name of the log in Redis. Servers of one name have one catalogue.
        stale_ms: Time without Redis after which answers say `catalog_stale`.
        wait_replicas: Replicas of Redis that shall have a change before it is acknowledged; None
            means 1 for Sentinel and Cluster, else 0.
    """

    place: str = FILE
    name: str = "items"
    stale_ms: float = 5000.0
    wait_replicas: int | None = None


@dataclass(frozen=True)
class ServiceOptions:
    """How a service is opened.

    Attributes:
        engine: Sizes and modes of the engine.
        dtype: Element type of the recommender; "auto" is the fastest that fits. None means
            float32 on a CPU and "auto" on CUDA.
        signing_key: Key of attribution tokens; None draws a random key. Tokens of a random key are
            not valid in another process.
        journal: Folder of item changes; None means a folder next to the bundle.
        text: A language model that the same engine serves; None for none.
        history_ttl_s: Age in seconds at which stored events are deleted; None keeps them forever.
            `?ttl_s=SECONDS` at the end of the store's URL does the same.
        weights: Format of the recommender's decoder weights; None means the element type.
        index_device: Where `dense` and `specgr` search; "auto" is CUDA where models and faiss run.
        history_timeout_ms: Time that a request waits for its stored history, where the store is on
            a network. Then it continues without it. None waits as long as the store takes to
            fail.
        event_types: Names of event types beside the built-in ones and those of the bundle.
        event_kinds: Kinds of event types, before those that the bundle was built with.
        effects: What slates, events and deletions change beside their answers.
        popular_half_life_s: Time in seconds after which an event counts half in the list `popular`.
        catalog_log: Where changes of items are stored.
        shown_from_answers: Whether each answer to a user counts as shown.
    """

    engine: EngineConfig = EngineConfig()
    dtype: DTypeName | None = None
    signing_key: bytes | None = None
    journal: Path | None = None
    text: LoadedText | None = None
    history_ttl_s: float | None = None
    weights: str | None = None
    index_device: Device = "auto"
    history_timeout_ms: int | None = None
    event_types: tuple[str, ...] = ()
    event_kinds: EventKinds = EventKinds()
    effects: Effects = Effects()
    popular_half_life_s: float = HALF_LIFE_S
    catalog_log: CatalogLogOptions = CatalogLogOptions()
    shown_from_answers: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.popular_half_life_s < float("inf"):
            raise ValueError(
                "popular_half_life_s: expected a number of seconds above 0, got "
                f"{self.popular_half_life_s}"
            )
