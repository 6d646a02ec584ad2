"""Reads and writes dates and times as RFC 3339 texts."""

from __future__ import annotations

import datetime
import math
import re
from decimal import Decimal

from recserve.bounds import NUMBER, NUMBER_OF_TIME, time_of_number

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EPOCH_DAY = _EPOCH.date().toordinal()
_SECONDS = re.compile(r"(.{10}[Tt ]\d\d:\d\d:)(\d\d)(?:[.,](\d+))?(.*)", re.ASCII | re.DOTALL)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d+))?", re.ASCII)


def parse_timestamp(text: str, utc: bool = False) -> Decimal:
    """Returns a date and time as exact seconds since 1970.

    A leap second (`23:59:60` in UTC) is the second before it.

    Args:
        text: RFC 3339 time; letters may be small.
        utc: Accepts a time without a zone, which is UTC.

    Raises:
        ValueError: If the text is no time, or has no time zone; the message says what was expected.
    """
    parts = _SECONDS.fullmatch(text)
    fraction, leap = Decimal(0), False
    plain = text.upper()
    if parts is not None:
        before, seconds, digits, zone = parts.groups()
        leap = seconds == "60"
        fraction = Decimal(f"0.{digits or 0}")
        plain = f"{before}{'59' if leap else seconds}{zone}".upper()
    try:
        moment = datetime.datetime.fromisoformat(plain)
    except ValueError:
        raise ValueError(f"expected RFC 3339, got {text[:60]!r}") from None
    if moment.tzinfo is None:
        if not utc:
            raise ValueError(f"has no time zone: {text[:60]!r}")
        moment = moment.replace(tzinfo=datetime.UTC)
    past = moment - _EPOCH
    # Offsets of zones are whole minutes in RFC 3339; fromisoformat also accepts fractions.
    whole = past.days * 86_400 + past.seconds
    if leap and whole % 86_400 != 86_399:
        raise ValueError(f"expected RFC 3339, got {text[:60]!r}: no leap second is at that time")
    return whole + Decimal(past.microseconds) / 1_000_000 + fraction


def parse_event_time(text: str) -> int:
    """Returns the time of an event in microseconds since 1970.

    Args:
        text: RFC 3339 with a zone, or a number since 1970 whose unit is told by its size.

    Raises:
        ValueError: If the text is neither; the message says what was expected.
    """
    time_us = time_of_number(text)
    if time_us is not None:
        return time_us
    if NUMBER.fullmatch(text):
        raise ValueError(f"expected RFC 3339, or {NUMBER_OF_TIME}, got {text[:60]}")
    return math.floor(parse_timestamp(text) * 1_000_000)


def parse_date(text: str) -> int:
    """Returns a date as days since 1970. Raises ValueError."""
    if _DATE.fullmatch(text):
        try:
            return datetime.date.fromisoformat(text).toordinal() - _EPOCH_DAY
        except ValueError:
            pass
    raise ValueError(f"expected a date such as 2026-11-26, got {text[:60]!r}")


def parse_clock(text: str) -> Decimal:
    """Returns a time of day as exact seconds since midnight. Raises ValueError."""
    if parts := _CLOCK.fullmatch(text):
        hour, minute, second = (int(part) for part in parts.groups()[:3])
        if hour < 24 and minute < 60 and second < 60:
            return hour * 3600 + minute * 60 + second + Decimal(f"0.{parts[4] or 0}")
    raise ValueError(f"expected a time such as 23:59:00, got {text[:60]!r}")


def format_timestamp(ticks: int, digits: int) -> str:
    """Returns a time in UTC.

    Args:
        ticks: Time since 1970 in units of 10**-digits seconds.
        digits: Decimal places of a second; zeros at the end are left out.

    Raises:
        OverflowError: If the year is not between 1 and 9999.
    """
    seconds, fraction = divmod(ticks, 10**digits)
    moment = _EPOCH + datetime.timedelta(seconds=seconds)
    return moment.isoformat().replace("+00:00", _fraction(fraction, digits) + "Z")


def format_date(days: int) -> str:
    """Returns the date of a number of days since 1970. Raises ValueError beyond year 9999."""
    return datetime.date.fromordinal(days + _EPOCH_DAY).isoformat()


def format_clock(ticks: int, digits: int) -> str:
    """Returns the time of day of a number of ticks of 10**-digits seconds since midnight."""
    seconds, fraction = divmod(ticks, 10**digits)
    minutes, second = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{_fraction(fraction, digits)}"


def _fraction(ticks: int, digits: int) -> str:
    return f".{ticks:0{digits}}".rstrip("0") if ticks else ""
