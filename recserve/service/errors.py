"""Failures a client can cause or meet, each a class of its own."""

from __future__ import annotations

from recserve.schemas.items import InvalidRequest


class UnknownItem(LookupError):
    """The item is not in the catalogue."""


class UnknownVersion(LookupError):
    """The catalogue version is not kept, or never was."""


class UnknownModel(LookupError):
    """The bundle holds no such model."""


class ServiceClosed(RuntimeError):
    """The service has been closed."""


class ContextExceeded(InvalidRequest):
    """Prompt and text together are longer than the model reads."""
