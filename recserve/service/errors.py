"""Exceptions of the service that a client can cause or encounter, one class per cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from recserve.core.constraint import ConstraintError
from recserve.core.errors import TooManyQueries
from recserve.engine.scheduler import RequestTooLarge
from recserve.schemas.items import (
    InvalidRequest,
    MissingField,
    UnknownField,
    UnsupportedField,
)
from recserve.speculation.verifier import UnfitDraft

Entry = TypeVar("Entry", bound="Refusal")


class UnknownItem(LookupError):
    """The item is not in the catalogue."""


class UnknownVersion(LookupError):
    """The catalogue version does not exist or is no longer in the archive."""


class CatalogBehind(RuntimeError):
    """This server does not have the catalogue version that the request names yet."""


class CatalogLost(RuntimeError):
    """The log of changes has lost the catalogue version that the request names."""


class CatalogConflict(RuntimeError):
    """Other servers changed items at the same time, again and again."""


class UnknownModel(LookupError):
    """The server has no model of this name or kind."""


class ServiceClosed(RuntimeError):
    """The service has been closed."""


class ContextExceeded(InvalidRequest):
    """Prompt and completion together exceed the context length of the model."""


class UnfitRule(InvalidRequest):
    """The acceptance rule of a request does not suit its drafter."""


@dataclass(frozen=True)
class Refusal:
    """How a refused request is reported, over HTTP and in the files of a batch job.

    Attributes:
        status: HTTP status.
        type: Field `type` of the error.
        code: Field `code` of the error.
    """

    status: int
    type: str
    code: str


INVALID = "invalid_request_error"
INVALID_STATUS = 422  # of most routes; see `invalid_status` of an operation
REFUSALS: dict[type[Exception], Refusal] = {
    UnknownItem: Refusal(404, "not_found_error", "unknown_item"),
    UnknownModel: Refusal(404, "not_found_error", "unknown_model"),
    UnknownVersion: Refusal(404, "not_found_error", "unknown_catalog_version"),
    InvalidRequest: Refusal(INVALID_STATUS, INVALID, "out_of_range"),
    UnknownField: Refusal(INVALID_STATUS, INVALID, "unknown_field"),
    MissingField: Refusal(INVALID_STATUS, INVALID, "missing_field"),
    UnsupportedField: Refusal(INVALID_STATUS, INVALID, "unsupported"),
    ContextExceeded: Refusal(INVALID_STATUS, INVALID, "context_length_exceeded"),
    RequestTooLarge: Refusal(INVALID_STATUS, INVALID, "request_too_large"),
    TooManyQueries: Refusal(INVALID_STATUS, INVALID, "request_too_large"),
    UnfitDraft: Refusal(INVALID_STATUS, INVALID, "unfit_draft"),
    ConstraintError: Refusal(INVALID_STATUS, INVALID, "constraint_failed"),
    UnfitRule: Refusal(INVALID_STATUS, INVALID, "unfit_draft"),
}


def nearest(error: BaseException, table: Mapping[type[Exception], Entry]) -> Entry | None:
    """Returns the entry of an error's nearest class in a table; None if there is none."""
    return next((table[kind] for kind in type(error).__mro__ if kind in table), None)


class Uncompiled(Exception):  # noqa: N818  no failure: what the request waits for
    """A constraint that has to be compiled before a request can go on.

    Attributes:
        compile: Compiles it for the cache, where a refusal is cached too.
        size: Characters of its texts, at least 1.
    """

    def __init__(self, compile_it: Callable[[], object], size: int) -> None:
        super().__init__("the constraint is not compiled")
        self.compile, self.size = compile_it, size
