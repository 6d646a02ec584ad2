"""Chooses the format of the metrics from `Accept`: Prometheus' text, or OpenMetrics."""

from __future__ import annotations

TEXT = "text/plain; version=1.0.0; charset=utf-8"
OLD_TEXT = "text/plain; version=0.0.4; charset=utf-8"  # the same bytes under the older version
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text"
TEXT_TYPES = ("text/plain", "text/*", "*/*")


def choose_format(accept: str) -> str:
    """Returns the content type of the format that a client prefers.

    The largest `q` counts, and of equal ones the first. Text is the answer if none is known.

    Args:
        accept: The header `Accept`; empty without one.

    Source: RFC 9110, section 12.5.1; the versions are those of Prometheus' scrape protocols.
    """
    best, best_q = TEXT, 0.0
    for offer in accept.lower().split(","):
        kind, *pairs = (part.strip() for part in offer.split(";"))
        split = [pair.partition("=") for pair in pairs]
        given = {name.strip(): value.strip(' "') for name, _, value in split}
        version = given.get("version", "")
        if kind == OPENMETRICS_TYPE and (version == "" or _is_first(version)):
            found = OPENMETRICS
        elif kind in TEXT_TYPES:
            found = OLD_TEXT if version.startswith("0.") else TEXT
        else:
            continue
        q = _quality(given.get("q", "1"))
        if q > best_q:
            best, best_q = found, q
    return best


def _is_first(version: str) -> bool:
    """Whether it is a version that a reader of 1.0.0 asks for."""
    return version.split(".")[0] == "1"


def _quality(text: str) -> float:
    """Returns a weight from 0 to 1; 0 if it is malformed."""
    try:
        q = float(text)
    except ValueError:
        return 0.0
    return q if 0 <= q <= 1 else 0.0
