"""Bytes of a body to a typed message."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from recserve.schemas.items import InvalidRequest
from recserve.schemas.validation import validation_error

T = TypeVar("T")


class MalformedBody(ValueError):
    """The body is not JSON."""


def decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """The body, typed and bounded.

    Raises MalformedBody where it is not JSON, InvalidRequest (field, bound, what came) where it
    does not fit.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), _plain(raw), decoder.type) from None
    except RecursionError:
        raise InvalidRequest(None, "the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(error) from None


def _plain(raw: bytes) -> Any:
    """Returns the body as plain types; UNSET where a number is too large for any of them.

    Raises:
        MalformedBody: If the body is not UTF-8.
    """
    try:
        return msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        raise _malformed(error) from None
    except (msgspec.DecodeError, RecursionError):
        return UNSET


def _malformed(error: Exception) -> MalformedBody:
    return MalformedBody(f"the body is not valid JSON: {error}")
