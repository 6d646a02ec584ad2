"""Opens the services that the settings of a server name."""

from __future__ import annotations

from dataclasses import fields, replace

from recserve.bundle.bundle import Bundle
from recserve.config import ServerConfig
from recserve.engine.engine_config import EngineConfig
from recserve.engine.kv_cache import DEFAULT_BYTES
from recserve.service import Service, ServiceOptions
from recserve.service.effects import Effects
from recserve.service.model_loader import resolve_device
from recserve.service.options import CatalogLogOptions
from recserve.service.replacement import check_successor, open_successor
from recserve.service.text.loader import LoadedText, TextSettings, load_text, open_drafters

# Names that EngineConfig and ServerConfig share; these settings pass through unchanged.
ENGINE_SETTINGS = sorted(
    {field.name for field in fields(EngineConfig)} & set(ServerConfig.model_fields)
)
HISTORY, ITEMS = ".history", ".items"  # in bundles_dir; no bundle name starts with a dot


class ServiceLoader:
    """Opens the first service of a server, and its successors.

    Attributes:
        config: Settings of the server.
        effects: What the services change beside their answers.
    """

    def __init__(
        self, config: ServerConfig, service: Service | None = None, effects: Effects | None = None
    ) -> None:
        """Opens nothing yet.

        Args:
            config: Settings of the server.
            service: The first service, if it is open already.
            effects: What the services change beside their answers; None means nothing.
        """
        self.config = config
        self.effects = effects or Effects()
        self._given = service
        self._text: LoadedText | None = None

    def first(self) -> Service:
        """Opens the service that the settings name, with a running engine."""
        given, self._given = self._given, None  # once replaced, it must not live on here
        if given is not None:
            given.set_effects(self.effects)
            return given
        config = self.config
        if config.llm is not None:
            settings = TextSettings(
                folder=config.llm,
                name=config.llm_name,
                dtype=config.llm_dtype,
                chat_template=config.chat_template,
                drafters=config.drafters,
                aliases=config.llm_aliases,
                weights=config.weights,
            )
            self._text = load_text(settings, resolve_device(config.device))
        options = self._options(self._text)
        if config.bundle is None:
            assert self._text is not None
            return Service.of_text(self._text, options.engine)
        store = config.store
        if store is None and config.bundles_dir is not None:
            store = f"lmdb:{config.bundles_dir.resolve() / HISTORY}"
        # A service reads some files later, so a symbolic link must not lead elsewhere by then.
        return Service.open(config.bundle.resolve(), store, config.device, options)

    def check(self, old: Service, bundle: Bundle, force: bool) -> None:
        """Raises UnfitBundle if a bundle cannot replace that of a service."""
        check_successor(old, bundle, self._options(None), force)

    def successor(self, old: Service, bundle: Bundle) -> Service:
        """Opens a bundle beside a service, with the same settings and language model."""
        text = self._text
        if text is not None:
            # Weights are only read and are shared. Drafters have state, so each engine has its own.
            drafters = open_drafters(self.config.drafters or ("none",), text.network)
            model = replace(text.model, drafters=drafters, default_drafter=next(iter(drafters)))
            text = LoadedText(text.network, drafters, model)
        return open_successor(old, bundle, self.config.device, self._options(text))

    def _options(self, text: LoadedText | None) -> ServiceOptions:
        config = self.config
        secret, journal = config.signing_key, config.journal
        if journal is None and config.bundles_dir is not None:
            journal = config.bundles_dir.resolve() / ITEMS
        engine = EngineConfig(**{name: getattr(config, name) for name in ENGINE_SETTINGS})
        engine = replace(engine, count_steps=config.metrics_compat is not None)
        if engine.kv_bytes == "auto" and config.bundles_dir is not None:
            # The next bundle is loaded beside this one and needs memory too.
            engine = replace(engine, kv_bytes=DEFAULT_BYTES)
        return ServiceOptions(
            engine=engine,
            dtype=config.dtype,
            signing_key=None if secret is None else secret.get_secret_value().encode(),
            journal=journal,
            text=text,
            history_ttl_s=config.history_ttl_s,
            weights=config.weights,
            index_device=config.index_device,
            history_timeout_ms=config.history_timeout_ms,
            event_types=config.event_types,
            event_kinds=config.event_kinds,
            effects=self.effects,
            popular_half_life_s=config.popular_half_life_s,
            shown_from_answers=config.shown_from_answers,
            catalog_log=CatalogLogOptions(
                config.catalog_log,
                config.catalog_name,
                config.catalog_stale_ms,
                config.catalog_wait_replicas,
            ),
        )
