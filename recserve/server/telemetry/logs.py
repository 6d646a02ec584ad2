"""The server's log: one style for recserve and uvicorn, as text or JSON, with a rate limit."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.types import Scope

from recserve.server.trace import Trace

access = logging.getLogger("recserve.access")
LogFormat = Literal["text", "json"]
LOGGERS = ("recserve", "uvicorn", "opentelemetry")
FIELDS = "recserve_fields"  # attribute of a log record with its structured fields
BURST, WINDOW_S = 5, 10.0  # so many equal warnings in so many seconds
MAX_KINDS = 256  # kinds of warnings whose rate is known


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Returns the argument `extra` of a log call whose record has these structured fields."""
    return {FIELDS: values}


class TextFormatter(logging.Formatter):
    """Formats a record as level, message and `name=value` fields."""

    def __init__(self) -> None:
        super().__init__("%(levelname)-9s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Returns the line without a traceback."""
        own = getattr(record, FIELDS, {})
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in own.items())])


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


@dataclass
class _Kind:
    """Warnings of one kind in the current window.

    Attributes:
        began_s: Start of the window.
        count: Warnings in the window.
    """

    began_s: float
    count: int = 0


class RepeatFilter(logging.Filter):
    """Drops equal warnings beyond BURST in WINDOW_S seconds; the next one says how many.

    Warnings are equal if they come from the same line of code with the same class of exception.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[object, _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is logged."""
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[0] if record.exc_info else None
        key, now = (record.name, record.lineno, error), self._clock()
        kind = self._kinds.setdefault(key, _Kind(now))
        self._kinds.move_to_end(key)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        if now - kind.began_s >= WINDOW_S:
            dropped = kind.count - BURST
            if dropped > 0:
                own = getattr(record, FIELDS, {})
                setattr(record, FIELDS, {**own, "dropped_before": dropped})
            kind.began_s, kind.count = now, 0
        kind.count += 1
        return kind.count <= BURST


def log_request(scope: Scope, trace: Trace) -> None:
    """Logs one line for an ended request. It has no path, query, body or user id."""
    access.info(
        "request",
        extra=fields(
            method=scope["method"],
            route=trace.route,
            status=trace.status,
            ms=round((time.monotonic() - trace.began_s) * 1e3, 2),
            strategy=trace.strategy,
            request_id=trace.request_id,
        ),
    )


def show_log(style: LogFormat = "text") -> None:
    """Logs to stderr, unless the program that embeds the server has configured logging."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RepeatFilter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(handler)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)
