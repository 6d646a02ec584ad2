"""What a server records beside its metrics: request lines, traces, slates."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from recserve.config import ConfigError, ServerConfig
from recserve.extras import install_advice
from recserve.metrics import Gauges
from recserve.server.telemetry.logs import log_request
from recserve.server.telemetry.traces import Tracing, open_tracing
from recserve.server.trace import Recorder
from recserve.service.slate_log.slate_log import SlateLog, SlateLogSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Telemetry:
    """The open log of slates and the traces of a server.

    Attributes:
        recorders: Take each ended request.
        slate_log: Log of slates and outcomes; None without one.
        tracing: Traces of requests; None if they are off.
    """

    recorders: tuple[Recorder, ...]
    slate_log: SlateLog | None
    tracing: Tracing | None

    @staticmethod
    def open(config: ServerConfig) -> Telemetry:
        """Starts what the settings ask for.

        Raises:
            ConfigError: If the folder of slates cannot be used, or the extra `otel` is missing.
        """
        slate_log, tracing = _slate_log(config), _tracing(config)
        recorders: tuple[Recorder, ...] = (log_request,) if config.access_log else ()
        if tracing is not None:
            recorders = (*recorders, tracing.record)
        return Telemetry(recorders, slate_log, tracing)

    def add_slate_log(self, gauges: Gauges | None) -> Gauges | None:
        """Returns the engine's figures with those of the slate log."""
        if gauges is None or self.slate_log is None:
            return gauges
        return replace(gauges, slate_log=self.slate_log.counts)

    def close(self) -> None:
        """Writes and sends what is left."""
        for part in (self.slate_log, self.tracing):
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
        config.slate_log_users,
        config.slate_log_rotate_s,
        config.slate_log_max_bytes,
    )
    try:
        return SlateLog(settings)
    except OSError as error:
        raise ConfigError(f"slate_log: {config.slate_log} cannot be used: {error}") from None


def _tracing(config: ServerConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    try:
        return open_tracing(config.otlp_endpoint, config.otlp_sample_ratio)
    except ImportError as error:
        advice = install_advice("otel")
        raise ConfigError(f"otlp_endpoint needs OpenTelemetry: {advice} ({error})") from None
