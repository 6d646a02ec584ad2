"""Decodes a request body from JSON bytes into a typed message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from recserve.schemas.items import InvalidRequest
from recserve.schemas.validation import GOT_FLOAT, number_texts, to_message, validation_error

T = TypeVar("T")


class MalformedBody(ValueError):
    """The body is not JSON."""


def decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """Decodes and validates a body.

    Args:
        decoder: Decoder of the message type.
        raw: The body.

    Raises:
        MalformedBody: If the body is not JSON.
        InvalidRequest: If a field is invalid; the error names field, bound and value.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        plain = _plain(raw, decoder.float_hook)
        if GOT_FLOAT in str(error) or number_texts(plain, decoder.type) != plain:
            return _convert(plain, decoder.type)
        raise validation_error(str(error), plain, decoder.type) from None
    except RecursionError:
        raise InvalidRequest(None, "the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed_body(error) from None


def _convert(plain: Any, kind: type[T]) -> T:
    """Converts a body with numbers in the place of others or of texts. Raises InvalidRequest."""
    try:
        return to_message(plain, kind)
    except RecursionError:
        raise InvalidRequest(None, "the body is nested too deep") from None


def _plain(raw: bytes, float_hook: Callable[[str], Any] | None) -> Any:
    """Returns the body as plain Python types; UNSET if a number is too large for them.

    Args:
        raw: The body.
        float_hook: Reads numbers with a point or an exponent.

    Raises:
        MalformedBody: If the body is not UTF-8.
    """
    try:
        return msgspec.json.Decoder(float_hook=float_hook).decode(raw)
    except UnicodeDecodeError as error:
        raise _malformed_body(error) from None
    except (msgspec.DecodeError, RecursionError):
        return UNSET


def _malformed_body(error: Exception) -> MalformedBody:
    return MalformedBody(f"the body is not valid JSON: {error}")
