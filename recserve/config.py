"""Settings of `recserve serve`, read from flags, environment and a YAML file."""

from __future__ import annotations

import difflib
import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from recserve.features.history.event_kinds import EventKinds
from recserve.features.history.type_names import check_type_names
from recserve.features.redis_urls import SCHEMES
from recserve.kernels.linear import formats

ENV_PREFIX = "RECSERVE_"
# recserve/kernels reads RECSERVE_KERNELS and RECSERVE_ISA itself, also without a server.
KERNEL_KEYS = ("kernels", "isa")
MIN_KEY_LENGTH = 16
MIN_CACHE_BYTES = 2**20


class ConfigError(ValueError):
    """A setting is unknown or out of range; the message names setting, bound and value."""


class ServerConfig(BaseSettings):
    """The settings of `recserve serve`. `bundle`, `llm` or both are required.

    Attributes:
        bundle: Folder of the bundle to serve.
        llm: Hugging Face folder of a language model to serve.
        llm_name: Name of the language model in requests. By default the folder's name.
        llm_aliases: Further names of the language model in requests.
        llm_dtype: Type of the language model's weights. `auto` takes the fastest that fits this
            machine. By default the folder's own type, or float32 on a CPU where that is faster and
            fits.
        chat_template: Jinja file to use instead of the chat template in the model's folder.
        drafters: `NAME`, or `NAME=DIR` for a drafter with weights. The first one is the default
            of requests.
        text_timeout_ms: Default deadline of a text request.
        host: Address to listen on. An address other than loopback needs `api_keys` or `insecure`.
        port: Port to listen on; 0 takes a free one.
        store: History store, `lmdb:PATH` or `redis://...`. By default an LMDB folder next to the
            bundle. `?ttl_s=SECONDS` at its end sets `history_ttl_s`, also in other commands.
        history_ttl_s: Age in seconds at which stored events are deleted. By default never.
        history_timeout_ms: Time that a request waits for its stored history in Redis or another
            store on a network. Then it continues without it, and `degraded` says so.
        event_types: Names of event types that clients may send, beside the built-in ones and those
            of the bundle's events. At most 255 in all, of at most 64 bytes each.
        positive_types: Event types that say that a user wants the item. Like the next two, before
            what the bundle was built with. Types that nothing names have the kind of their name.
        read_types: Event types that say only that a user has seen the item.
        negative_types: Event types that say that a user does not want the item. `NAME<VALUE`, as in
            `rating<2.5`: events of a type with a lower value.
        popular_half_life_s: Time after which an event counts half in the list `popular`, which also
            answers users without a history and fills slates.
        shown_from_answers: True counts each item of an answer to a user as shown. Then clients send
            no `shown_ids`. By default only what clients say counts.
        journal: Folder for changes of items. By default a folder next to the bundle.
        catalog_log: Where changes of items are stored: `file`, the journal of one process; `redis`,
            the Redis of `store`; or the URL of a Redis. Servers with one log in Redis have one
            catalogue, and each of them takes changes.
        catalog_name: Name of that log in Redis. Servers with the same name share it.
        catalog_stale_ms: Time without Redis after which a server with such a log says
            `catalog_stale` in `degraded` and refuses changes of items.
        catalog_wait_replicas: Replicas of Redis that shall have a change of items before it is
            answered. By default 1 with Sentinel and Cluster, and 0 with one Redis.
        device: Where the models run.
        index_device: Where `dense` and `specgr` search the item vectors. `auto` takes the GPU if
            the models run there and faiss is built for it. `cuda` is an error elsewhere.
        bundles_dir: Folder of the bundles that an operator may load while the server runs. With
            it, `store` and `journal` are by default in its subfolders `.history` and `.items`, so
            that all bundles share them.
        api_keys: Accepted keys, of 16 characters or more. A client sends one of them as
            `Authorization: Bearer KEY`.
        key_quota: Requests per minute that each of `api_keys` may send. A key that was idle for a
            minute may send all of them at once. By default no limit. Each process counts for
            itself.
        admin_keys: Keys of the routes below `/admin/`, of 16 characters or more. Without any these
            routes are disabled.
        allowed_hosts: Without `api_keys`, host names that clients may use beside those of the
            loopback interface. Pages of these hosts may send requests, also with a Basic key.
        insecure: True allows an address that other machines can reach without any key.
        signing_key: Key that signs attribution tokens. By default a new key at each start, so
            that tokens of an earlier process are invalid. Required where several replicas serve.
        max_body_bytes: Largest accepted request body.
        default_timeout_ms: Default deadline of a recommendation or ranking.
        kv_bytes: Size of the KV cache of each model. `auto` takes 256 MiB on a CPU and with
            `bundles_dir`, and most of the free memory on CUDA.
        kv_dtype: `fp8` stores keys and values in 8 bits. By default the model's own type.
        max_queue: Most requests that may wait for each model. Another request gets 429. Each text,
            input and ranking of a body counts.
        queue_share: Share of the places in a model's queue which one client may take, of those that
            other clients leave. It also bounds a client's share of the threads that prepare
            requests. A client is a key of `api_keys`, or an address without keys. 1 sets no bound.
        trusted_proxies: Addresses and networks (`10.0.0.0/8`) of proxies whose `X-Forwarded-For`
            names the client. Other senders of this header are clients themselves.
        max_running: Most requests that share a forward pass. Fewer are answered sooner when the
            engine is full; more are answered in all.
        max_connections: Most clients connected at the same time. Another client gets 503.
        header_timeout_s: Time from a connection, or from a request's first byte, to the last
            header.
        body_timeout_s: Time from the last header to the end of the body.
        drain_delay_s: Time for which a draining server still accepts connections and answers
            `ready` with 503.
        drain_timeout_s: Time that running requests have to finish. The process ends at most 5 s
            after `drain_delay_s` and `drain_timeout_s`.
        stall_timeout_s: Time after which a step of the engine counts as hanging, and `ready` is
            answered with 503.
        threads: Threads of torch. By default torch's own choice.
        dtype: Type of the recommender's weights and KV cache. `auto` takes the fastest that fits
            this machine. By default float32 on a CPU, and `auto` on CUDA.
        weights: `int8` stores the matrices of the recommender's decoder and of the language model
            in 8 bits. By default the model's own type.
        load_aware: True drafts text only as deep as pays under the current load. False drafts
            whenever drafts are accepted at all, for the shortest time of a text on an idle machine.
        graphs: True captures CUDA graphs at start. By default true on CUDA.
        invariant: True makes every response bitwise independent of other requests, drafts and
            caches. CPU only.
        experiments: A/B experiments inside the server, see the guide to experiments.
        experiments_dir: Folder for the counts of `experiments`, so that they survive a restart. By
            default a folder next to the bundle, or `.experiments` in `bundles_dir`. Servers with
            `catalog_log` in Redis have their counts there instead, and share them.
        access_log: True logs one line for each request, without paths and user ids.
        log_format: Format of the log: `text`, or `json` with one object per line.
        slate_log: Folder for a Parquet log of slates and of the events that they led to.
        slate_log_users: How that log names a user: by a hash keyed by `signing_key`, by the id, or
            not at all.
        slate_log_rotate_s: Time after which logged rows are written. A crash loses no older ones.
        slate_log_max_bytes: Size of the slate log above which its oldest files are deleted.
        event_log: Folder for a Parquet log of accepted events and corrections, which
            `recserve build` reads. It names users by their ids.
        event_log_rotate_s: As `slate_log_rotate_s`, for the event log.
        event_log_max_bytes: As `slate_log_max_bytes`, for the event log.
        otlp_endpoint: URL of an OpenTelemetry receiver (OTLP over HTTP) for traces. Needs the extra
            `otel`.
        otlp_sample_ratio: Share of the requests that are traced, unless the caller has decided.
        metrics_compat: `vllm` also exports the text metrics under vLLM's names.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    bundle: Path | None = None
    llm: Path | None = None
    llm_name: str | None = Field(None, min_length=1, max_length=256)
    llm_aliases: Annotated[tuple[str, ...], NoDecode] = ()
    llm_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    chat_template: Path | None = None
    drafters: Annotated[tuple[str, ...], NoDecode] = ()
    text_timeout_ms: int = Field(600_000, ge=1, le=3_600_000)
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    store: str | None = None
    history_ttl_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    history_timeout_ms: int = Field(100, ge=1, le=60_000)
    event_types: Annotated[tuple[str, ...], NoDecode] = ()
    positive_types: Annotated[tuple[str, ...], NoDecode] = ()
    read_types: Annotated[tuple[str, ...], NoDecode] = ()
    negative_types: Annotated[tuple[str, ...], NoDecode] = ()
    popular_half_life_s: float = Field(7 * 86_400, gt=0, allow_inf_nan=False)
    shown_from_answers: bool = False
    journal: Path | None = None
    catalog_log: str = "file"
    catalog_name: str = Field("items", pattern=r"^[A-Za-z0-9._:-]{1,64}$")
    catalog_stale_ms: int = Field(5000, ge=100, le=3_600_000)
    catalog_wait_replicas: int | None = Field(None, ge=0, le=100)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    index_device: Literal["auto", "cpu", "cuda"] = "auto"
    bundles_dir: Path | None = None
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    key_quota: int | None = Field(None, ge=1, le=100_000_000)
    admin_keys: Annotated[list[SecretStr], NoDecode] = []
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    insecure: bool = False
    signing_key: SecretStr | None = None
    max_body_bytes: int = Field(1 << 20, ge=1 << 10, le=64 << 20)
    default_timeout_ms: int = Field(10_000, ge=1, le=60_000)
    kv_bytes: int | Literal["auto"] = "auto"
    kv_dtype: Literal["fp8"] | None = None
    max_queue: int = Field(1024, ge=1, le=1_000_000)
    queue_share: float = Field(0.5, gt=0, le=1)
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    max_running: int = Field(64, ge=1, le=4096)
    max_connections: int = Field(4096, ge=1, le=1_000_000)
    header_timeout_s: float = Field(10.0, gt=0, le=3600)
    body_timeout_s: float = Field(30.0, gt=0, le=3600)
    drain_delay_s: float = Field(0.5, ge=0, le=600)
    drain_timeout_s: float = Field(30.0, ge=0, le=3600)
    stall_timeout_s: float = Field(30.0, gt=0, le=3600)
    threads: int | None = Field(None, ge=1, le=1024)
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    weights: Annotated[str | None, AfterValidator(formats.check_format)] = None
    load_aware: bool = True
    graphs: bool | None = None
    invariant: bool = False
    experiments: tuple[dict[str, Any], ...] = ()
    experiments_dir: Path | None = None
    access_log: bool = False
    log_format: Literal["text", "json"] = "text"
    slate_log: Path | None = None
    slate_log_users: Literal["hash", "id", "none"] = "hash"
    slate_log_rotate_s: float = Field(60.0, gt=0, le=86_400)
    slate_log_max_bytes: int = Field(10 << 30, ge=1 << 20)
    event_log: Path | None = None
    event_log_rotate_s: float = Field(60.0, gt=0, le=86_400)
    event_log_max_bytes: int = Field(10 << 30, ge=1 << 20)
    otlp_endpoint: str | None = Field(None, pattern="^https?://[^/]+")
    otlp_sample_ratio: float = Field(1.0, ge=0, le=1)
    metrics_compat: Literal["vllm"] | None = None

    @field_validator(
        *("api_keys", "admin_keys", "drafters", "allowed_hosts", "llm_aliases", "event_types"),
        *("positive_types", "read_types", "negative_types"),
        "trusted_proxies",
        mode="before",
    )
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Splits the environment's single string at commas."""
        return (
            [k.strip() for k in value.split(",") if k.strip()] if isinstance(value, str) else value
        )

    @field_validator("kv_bytes", mode="before")
    @classmethod
    def _bytes_or_auto(cls, value: Any) -> Any:
        """Returns a number of bytes or `auto`. A union of types has unreadable errors."""
        if value == "auto":
            return value
        whole = isinstance(value, float) and value.is_integer()
        text = str(int(value) if whole else value)
        if not text.isdigit() or int(text) < MIN_CACHE_BYTES:
            raise ValueError(f"expected auto, or {MIN_CACHE_BYTES} bytes or more, got {value!r}")
        return int(text)

    @field_validator("trusted_proxies")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            try:
                ipaddress.ip_network(one)
            except ValueError:
                raise ValueError(f"expected addresses or networks of IP, got {one!r}") from None
        return value

    @field_validator("api_keys", "admin_keys", "signing_key")
    @classmethod
    def _long_enough(cls, value: Any) -> Any:
        for key in value if isinstance(value, tuple | list) else (value,) if value else ():
            length = len(key.get_secret_value())
            if length < MIN_KEY_LENGTH:
                raise ValueError(f"a key needs {MIN_KEY_LENGTH} characters or more, got {length}")
        return value

    @field_validator("event_types")
    @classmethod
    def _check_event_types(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        check_type_names(value)
        return value

    @property
    def catalog_url(self) -> str | None:
        """URL of the Redis that has the log of item changes; None if a file has it."""
        if self.bundle is None or self.catalog_log == "file":
            return None
        return self.store if self.catalog_log == "redis" else self.catalog_log

    @property
    def event_kinds(self) -> EventKinds:
        """Kinds of the event types that the settings name."""
        return EventKinds(self.positive_types, self.read_types, self.negative_types)

    @model_validator(mode="after")
    def _check_event_kinds(self) -> ServerConfig:
        try:
            kinds = self.event_kinds
            check_type_names({*self.event_types, *kinds.named})
        except ValueError as fault:
            raise ValueError(f"positive_types, read_types, negative_types: {fault}") from None
        return self

    @model_validator(mode="after")
    def _something_to_serve(self) -> ServerConfig:
        if self.bundle is None and self.llm is None:
            raise ValueError("bundle: is required unless llm is set")
        if self.llm is None:
            for name in ("llm_name", "llm_aliases", "llm_dtype", "chat_template", "drafters"):
                if getattr(self, name):
                    raise ValueError(f"{name}: is for a language model; set llm too")
        if self.bundle is None and self.slate_log is not None:
            raise ValueError("slate_log: is for slates; set bundle too")
        if self.bundle is None and self.event_log is not None:
            raise ValueError("event_log: is for events of users; set bundle too")
        return self

    @model_validator(mode="after")
    def _reachable_log(self) -> ServerConfig:
        place = self.catalog_log
        if place not in ("file", "redis") and not is_redis(place):
            raise ValueError(
                "catalog_log: expected file, redis or a URL such as redis://HOST:PORT/DB, got "
                f"{place.partition('://')[0][:20]!r}"
            )
        if self.catalog_log == "redis" and not is_redis(self.store):
            raise ValueError(
                "catalog_log: redis is the Redis of store, and store is not redis://...; set store "
                "to it, or catalog_log to a URL such as redis://HOST:PORT/DB"
            )
        return self

    @model_validator(mode="after")
    def _one_signing_key(self) -> ServerConfig:
        if self.catalog_url is not None:
            self.check_signing_key("catalog_log is a Redis, whose catalogue several replicas share")
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> ServerConfig:
        if not (is_loopback(self.host) or self.api_keys or self.insecure):
            raise ValueError(
                f"host {self.host} can be reached from outside and no api_keys are set; "
                "set api_keys, bind 127.0.0.1, or set insecure: true"
            )
        return self

    def check_signing_key(self, replicas: str) -> None:
        """Raises ConfigError if several replicas serve slates without a common `signing_key`.

        Args:
            replicas: What makes several replicas serve, such as a setting and its value.
        """
        if self.bundle is not None and self.signing_key is None:
            raise ConfigError(
                f"signing_key: is required, because {replicas}: each replica would draw a key of "
                "its own and refuse the attribution tokens of the others. Give all replicas the "
                f"same {MIN_KEY_LENGTH} characters or more, for example "
                "RECSERVE_SIGNING_KEY=$(openssl rand -hex 24)"
            )

    def check_files(self) -> None:
        """Finds cheap mistakes before anything is imported or loaded.

        Raises:
            ConfigError: If a file or folder is missing, or the port is taken. The message names
                the setting.
        """
        for name, path, file in (
            ("bundle", self.bundle, "manifest.json"),
            ("llm", self.llm, "config.json"),
        ):
            if path is not None and not path.is_dir():
                raise ConfigError(f"{name} is {path}; there is no such folder")
            if path is not None and not (path / file).is_file():
                raise ConfigError(f"{name} is {path}, which has no {file}")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError(f"chat_template is {self.chat_template}; there is no such file")
        for drafter in self.drafters:
            name, _, folder = drafter.partition("=")
            if folder and not Path(folder).is_dir():
                raise ConfigError(f"drafters: {name} is {folder}; there is no such folder")
        if self.port:
            self._check_port()

    def _check_port(self) -> None:
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"host {self.host}, port {self.port}: {reason}; choose another --port, or end the "
                "server that has it"
            ) from None

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any],
        file: Path | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> ServerConfig:
        """Loads the settings. Flags override the environment, which overrides the file.

        Args:
            flags: Values by setting. None means that the flag was not given.
            file: YAML file of settings.
            defaults: Values of settings that nothing else sets.

        Raises:
            ConfigError: If the file is unreadable, a key is unknown or a value is out of range.
        """
        for name in os.environ:
            if name.upper().startswith(ENV_PREFIX):
                key = name[len(ENV_PREFIX) :].lower()
                if key not in cls.model_fields and key not in KERNEL_KEYS:
                    raise ConfigError(f"environment: {_unknown(key, name)}")
        if file is not None and not file.is_file():
            raise ConfigError(f"config file {file} does not exist")

        class _WithFile(cls):  # type: ignore[misc, valid-type]
            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: PydanticBaseSettingsSource,
                env_settings: PydanticBaseSettingsSource,
                dotenv_settings: PydanticBaseSettingsSource,
                file_secret_settings: PydanticBaseSettingsSource,
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                yaml = YamlConfigSettingsSource(settings_cls, yaml_file=file)
                last = InitSettingsSource(settings_cls, dict(defaults or {}))
                return init_settings, env_settings, yaml, last

        try:
            loaded = _WithFile(**{k: v for k, v in flags.items() if v is not None})
        except ValidationError as error:
            raise ConfigError("; ".join(_words(e) for e in error.errors())) from None
        except Exception as error:
            raise ConfigError(f"config file {file} cannot be read: {error}") from None
        return cls.model_construct(**{name: getattr(loaded, name) for name in cls.model_fields})


def is_redis(store: str | None) -> bool:
    """Whether a URL is one of a Redis."""
    return store is not None and "://" in store and store.partition("://")[0] in SCHEMES


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    # Before Python 3.13, ::ffff:127.0.0.1 is no loopback address for `is_loopback`.
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def _unknown(key: str, shown: str) -> str:
    near = difflib.get_close_matches(key, ServerConfig.model_fields, 1)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"known keys: {', '.join(ServerConfig.model_fields)}"
    )
    return f"unknown key {shown}; {hint}"


def _words(error: Any) -> str:
    """Formats a pydantic error as setting, bound and value."""
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _unknown(name, name)
    if error["type"] == "missing":
        return f"{name}: is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message}, got {str(error['input'])[:80]!r}"
