"""Exceptions of the service that a client can cause or encounter, one class per cause."""

from __future__ import annotations

from recserve.schemas.items import InvalidRequest


class UnknownItem(LookupError):
    """The item is not in the catalogue."""


class UnknownVersion(LookupError):
    """The catalogue version does not exist or is no longer in the archive."""


class UnknownModel(LookupError):
    """The server has no model of this name or kind."""


class ServiceClosed(RuntimeError):
    """The service has been closed."""


class ContextExceeded(InvalidRequest):
    """Prompt and completion together exceed the context length of the model."""


class UnfitRule(InvalidRequest):
    """The acceptance rule of a request does not suit its drafter."""
