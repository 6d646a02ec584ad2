"""What a server records beside its metrics: request lines, traces, slates, events."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from recserve.config import ConfigError, ServerConfig
from recserve.extras import describe_missing
from recserve.metrics import Gauges
from recserve.server.telemetry.logs import log_request
from recserve.server.telemetry.traces import Tracing, open_tracing
from recserve.server.trace import Recorder
from recserve.service.event_log import EventLogWriter
from recserve.service.parquet_log import LogOptions
from recserve.service.slate_log.slate_log import SlateLog, SlateLogSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Telemetry:
    """The open logs and the traces of a server.

    Attributes:
        recorders: Take each ended request.
        slate_log: Log of slates and outcomes; None without one.
        event_log: Log of accepted events and corrections; None without one.
        tracing: Traces of requests; None if they are off.
    """

    recorders: tuple[Recorder, ...]
    slate_log: SlateLog | None
    event_log: EventLogWriter | None
    tracing: Tracing | None

    @staticmethod
    def open(config: ServerConfig) -> Telemetry:
        """Starts what the settings ask for.

        Raises:
            ConfigError: If the folder of a log cannot be used, or the extra `otel` is missing.
        """
        slate_log, event_log, tracing = _slate_log(config), _event_log(config), _tracing(config)
        recorders: tuple[Recorder, ...] = (log_request,) if config.access_log else ()
        if tracing is not None:
            recorders = (*recorders, tracing.record)
        return Telemetry(recorders, slate_log, event_log, tracing)

    def add_logs(self, gauges: Gauges | None) -> Gauges | None:
        """Returns the engine's figures with those of the logs."""
        if gauges is None:
            return None
        slates, events = self.slate_log, self.event_log
        return replace(
            gauges,
            slate_log=None if slates is None else slates.counts,
            event_log=None if events is None else events.counts,
        )

    def close(self) -> None:
        """Writes and sends what is left."""
        for part in (self.slate_log, self.event_log, self.tracing):
            if part is not None:
                part.close()


def vllm_model(config: ServerConfig) -> str | None:
    """Returns the value of vLLM's label `model_name`; None without vLLM's metrics."""
    if config.metrics_compat is None:
        return None
    folder = "" if config.llm is None else config.llm.resolve().name
    return config.llm_name or folder


def _slate_log(config: ServerConfig) -> SlateLog | None:
    if config.slate_log is None:
        return None
    if config.signing_key is None:
        log.warning("slate_log without signing_key: the next process cannot verify these tokens")
    settings = SlateLogSettings(
        config.slate_log,
        config.slate_log_rotate_s,
        config.slate_log_max_bytes,
        config.slate_log_users,
    )
    try:
        return SlateLog(settings)
    except OSError as error:
        raise ConfigError(f"slate_log: {config.slate_log} cannot be used: {error}") from None


def _event_log(config: ServerConfig) -> EventLogWriter | None:
    if config.event_log is None:
        return None
    options = LogOptions(config.event_log, config.event_log_rotate_s, config.event_log_max_bytes)
    try:
        return EventLogWriter(options)
    except OSError as error:
        raise ConfigError(f"event_log: {config.event_log} cannot be used: {error}") from None


def _tracing(config: ServerConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    try:
        return open_tracing(config.otlp_endpoint, config.otlp_sample_ratio)
    except ModuleNotFoundError as error:
        if (message := describe_missing(error, "otlp_endpoint")) is None:
            raise
        raise ConfigError(message) from None
