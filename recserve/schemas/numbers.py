"""Numbers of JSON texts without the loss of a double."""

from __future__ import annotations

import decimal
from decimal import Decimal

import msgspec

ENCODER = msgspec.json.Encoder(decimal_format="number")
"""Writes decimals as numbers with all their digits."""


def exact_number(text: str) -> float | Decimal:
    """Returns the number of a JSON text with a point or an exponent; a hook for msgspec.

    A text that Python would write for a float becomes that float. Any other text becomes a decimal
    with all its digits.

    Raises:
        ValueError: If the exponent has more than 18 digits.
    """
    short = float(text)
    if repr(short) == text:
        return short
    try:
        return Decimal(text)
    except decimal.InvalidOperation:
        raise ValueError("Number out of range") from None
