"""Settings of `recserve serve`, one schema: flag over RECSERVE_* environment over YAML file."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

ENV_PREFIX = "RECSERVE_"
# RECSERVE_KERNELS and RECSERVE_ISA: recserve/kernels reads them where there is no server too.
KERNEL_KEYS = ("kernels", "isa")
MIN_KEY_LENGTH = 16


class ConfigError(ValueError):
    """A setting is unknown or out of range; the message names it, its bound and what came."""


class ServerConfig(BaseSettings):
    """What `recserve serve` can be told. `bundle`, `llm` or both are required.

    llm: a Hugging Face folder of a language model. llm_name: what `model` says in a request, None:
    the folder's name. llm_dtype: "auto" is the fastest here; None is the folder's own type, or
    float32 on a CPU where that is faster. chat_template: a file to use instead of
    the folder's. drafters: `NAME`, or `NAME=DIR` for one with weights; the first is the one of
    requests that name none. text_timeout_ms: most time for a text, unless the request says less.
    store: `lmdb:PATH` or `redis://...`; None: an LMDB folder beside the bundle. journal: folder for
    changes of items; None: beside the bundle. api_keys: a client
    sends one of them as `Authorization: Bearer KEY`; without any, only a loopback address is bound
    unless `insecure`. signing_key: signs attribution tokens; None: drawn at start, so that tokens
    do not outlive the process. max_queue: requests waiting for the engine before 429.
    max_connections: clients connected at once; further ones get 503. header_timeout_s: time from
    the connection, or from a request's first byte, to its last header. body_timeout_s: time from
    there to the end of its body.
    drain_delay_s: how long a draining server still answers `ready` with 503 before it stops
    listening. threads: of torch, None: its own choice. load_aware: texts are drafted as
    far as the load lets it pay. graphs: text steps are recorded as CUDA graphs at start, None:
    where there is CUDA. invariant: no bit of an answer depends on other requests, on drafts or on
    what is cached; CPU only. dtype: of the recommender's weights and of its cache; "auto" is the
    fastest here. kv_dtype: of
    every model's cache, None: as the model computes. shadow: a strategy that is compared with the
    answers given, on `shadow_share` of them. warm_drafts: deprecated, without
    effect: events with `warm` compute the user's root alone.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    bundle: Path | None = None
    llm: Path | None = None
    llm_name: str | None = Field(None, min_length=1, max_length=256)
    llm_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    chat_template: Path | None = None
    drafters: Annotated[tuple[str, ...], NoDecode] = ()
    text_timeout_ms: int = Field(600_000, ge=1, le=3_600_000)
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    store: str | None = None
    journal: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    insecure: bool = False
    signing_key: SecretStr | None = None
    max_body_bytes: int = Field(1 << 20, ge=1 << 10, le=64 << 20)
    default_timeout_ms: int = Field(10_000, ge=1, le=60_000)
    kv_bytes: int = Field(256 * 2**20, ge=2**20)
    kv_dtype: Literal["fp8"] | None = None
    max_queue: int = Field(1024, ge=1, le=1_000_000)
    max_connections: int = Field(4096, ge=1, le=1_000_000)
    header_timeout_s: float = Field(10.0, gt=0, le=3600)
    body_timeout_s: float = Field(30.0, gt=0, le=3600)
    drain_delay_s: float = Field(0.5, ge=0, le=600)
    drain_timeout_s: float = Field(30.0, ge=0, le=3600)
    threads: int | None = Field(None, ge=1, le=1024)
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    load_aware: bool = False
    graphs: bool | None = None
    invariant: bool = False
    shadow: str | None = None
    shadow_share: float = Field(0.01, ge=0, le=1)
    warm_drafts: bool = True
    access_log: bool = False

    @field_validator("api_keys", "drafters", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """The environment gives one string: parts between commas."""
        return (
            [k.strip() for k in value.split(",") if k.strip()] if isinstance(value, str) else value
        )

    @field_validator("api_keys", "signing_key")
    @classmethod
    def _long_enough(cls, value: Any) -> Any:
        for key in value if isinstance(value, tuple) else (value,) if value else ():
            length = len(key.get_secret_value())
            if length < MIN_KEY_LENGTH:
                raise ValueError(f"a key needs {MIN_KEY_LENGTH} characters or more, got {length}")
        return value

    @model_validator(mode="after")
    def _something_to_serve(self) -> ServerConfig:
        if self.bundle is None and self.llm is None:
            raise ValueError("bundle: is required, or llm, or both")
        if self.llm is None:
            for name in ("llm_name", "llm_dtype", "chat_template", "drafters"):
                if getattr(self, name):
                    raise ValueError(f"{name}: is for a language model; set llm too")
        return self

    @model_validator(mode="after")
    def _guarded(self) -> ServerConfig:
        if not (is_loopback(self.host) or self.api_keys or self.insecure):
            raise ValueError(
                f"host {self.host} can be reached from outside and no api_keys are set; "
                "set api_keys, bind 127.0.0.1, or say insecure: true"
            )
        return self

    @classmethod
    def load(cls, flags: Mapping[str, Any], file: Path | None = None) -> ServerConfig:
        """Settings from flags (None: not given), the environment and a YAML file, in this order.

        Raises ConfigError for an unreadable file, an unknown key or a value out of range.
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
                return init_settings, env_settings, yaml

        try:
            loaded = _WithFile(**{k: v for k, v in flags.items() if v is not None})
        except ValidationError as error:
            raise ConfigError("; ".join(_words(e) for e in error.errors())) from None
        except Exception as error:
            raise ConfigError(f"config file {file} cannot be read: {error}") from None
        return cls.model_construct(**{name: getattr(loaded, name) for name in cls.model_fields})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _unknown(key: str, shown: str) -> str:
    near = difflib.get_close_matches(key, ServerConfig.model_fields, 1)
    hint = (
        f"did you mean {near[0]}?" if near else f"there are {', '.join(ServerConfig.model_fields)}"
    )
    return f"unknown key {shown}; {hint}"


def _words(error: Any) -> str:
    """One of pydantic's findings as: setting, bound, what came."""
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _unknown(name, name)
    if error["type"] == "missing":
        return f"{name}: is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message}, got {str(error['input'])[:80]!r}"
